"""A situation of communication alone: a mesh, one of its axes, and an array cut along it.  Frozen; its repr makes it again."""
from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from refpar.comm.placement import Placement
from refpar.config import Layout


@dataclass(frozen=True)
class CommSituation:
    """Every group of the axis does the same thing at the same time, with numbers of its own.

    (The order of ranks and the eager limit of threads are not part of it: they belong to the world.)
    """
    layout: Layout = Layout(dp=2, tp=3)
    axes: tuple[str, ...] = ("tp",)         # the axis, or several taken as one
    shape: tuple[int, ...] = (5, 4)         # of the whole array
    dim: int = 0                            # the dim along which it is cut
    sizes: tuple[int, ...] = (2, 2, 1)      # the shards' lengths there
    other: int = 1                          # another dim, along which all_to_all cuts it
    other_sizes: tuple[int, ...] = (2, 1, 1)
    dtype: str = "float64"
    root: int = 0
    op: str = "add"                         # what reductions do: add or maximum
    segment: int = 16                       # bytes of a message of pipelines
    node: int | None = None                 # ranks of one node
    cases: tuple[str, ...] = ()             # what is run, by name; none: everything
    strided: bool = False                   # arguments that are no single run of memory
    seed: int = 0

    def __post_init__(self):
        p = math.prod(getattr(self.layout, axis) for axis in self.axes)
        for dim, sizes in ((self.dim, self.sizes), (self.other, self.other_sizes)):
            if len(sizes) != p or sum(sizes) != self.shape[dim]:
                raise ValueError(f"situation: sizes {sizes} must be {p} lengths with the sum {self.shape[dim]} of dim {dim}")
        if self.dim == self.other or not 0 <= self.root < p:
            raise ValueError(f"situation: dim {self.dim} and other {self.other} must differ, and root {self.root} be below {p}")

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    @property
    def size(self) -> int:
        """Ranks on the axis."""
        return len(self.sizes)

    @property
    def ufunc(self) -> np.ufunc:
        """What reductions do."""
        return getattr(np, self.op)

    def even(self) -> CommSituation:
        """The same, with all shards as long as the first."""
        shape = list(self.shape)
        shape[self.dim] = self.size * self.sizes[0]
        return replace(self, shape=tuple(shape), sizes=(self.sizes[0],) * self.size)

    def sizes_of(self, dim: int) -> tuple[int, ...]:
        """The lengths of the shards along `dim` or `other`."""
        return {self.dim: self.sizes, self.other: self.other_sizes}[dim]

    def shard_shape(self, dim: int, index: int) -> tuple[int, ...]:
        """The shape of one rank's shard."""
        return (*self.shape[:dim], self.sizes_of(dim)[index], *self.shape[dim + 1:])

    def numbers(self, shape, *key) -> np.ndarray:
        """Small whole numbers of the dtype, the same for the same key; read-only, so that who writes into them is found."""
        return self._dress(np.random.default_rng([self.seed, *key]).integers(-4, 5, shape).astype(self.dtype))

    def fractions(self, shape, *key) -> np.ndarray:
        """Numbers of several magnitudes and both signs, so that every sum is rounded."""
        rng = np.random.default_rng([self.seed, *key])
        return self._dress((rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, shape)).astype(self.dtype))

    def held(self, placement: Placement, group: int, index: int, purpose: int) -> np.ndarray:
        """What one rank of a group holds of a drawn value."""
        if placement.kind == "Partial":
            return self.numbers(self.shape, purpose, group, index + 1)
        value = self.numbers(self.shape, purpose, group, 0)
        if placement.kind == "Shard":
            sizes = self.sizes_of(placement.dim)
            first = sum(sizes[:index])
            return self._dress(value.take(range(first, first + sizes[index]), axis=placement.dim))
        return value

    def _dress(self, array):
        if self.strided:
            array = np.repeat(array, 2, axis=-1)[..., ::2]
        array.flags.writeable = False
        return array
