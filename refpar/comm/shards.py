"""How a dim is cut into the shards of an axis, and how a shard becomes a run of bytes that can be sent.

`sizes` is always the lengths of all shards along the dim, one for each rank of the axis; any lengths do, zero too.  A message is a
run of memory, and a shard along an inner dim is not: so collectives bring that dim to the front, work on flat arrays, in which each
shard is one slice, and bring the dim back at the end.
"""
from __future__ import annotations

from itertools import accumulate

import numpy as np

from refpar.config import shares


def slices(lengths) -> list[slice]:
    """Consecutive slices of these lengths: [2, 0, 3] -> 0:2, 2:2, 2:5."""
    ends = list(accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths)]


def checked(call: str, x, dim: int, sizes, axis, whole: bool) -> tuple[int, list[int]]:
    """The dim, counted from the front, and the sizes, by default as even as can be.  `whole`: x is the whole array, not a shard.
    `call` is who asks, for the sentence.

    ValueError, one sentence, where x has no such dim, or the sizes do not fit the axis or x.
    """
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{call} on {axis.name}: dim {dim} does not exist in an array of {x.ndim} dims, shape {list(x.shape)}")
    dim %= x.ndim
    sizes = shares(x.shape[dim], axis.size) if sizes is None else [int(size) for size in sizes]
    if len(sizes) != axis.size or min(sizes) < 0:
        raise ValueError(f"{call} on {axis.name}: sizes {sizes} must be {axis.size} lengths of at least 0, one for each rank")
    expected = sum(sizes) if whole else sizes[axis.index]
    if x.shape[dim] != expected:
        raise ValueError(f"{call} on {axis.name}: dim {dim} of index {axis.index} has length {x.shape[dim]}, and sizes {sizes} "
                         f"make it {expected}")
    return dim, sizes


def part_of(x, dim: int, part: slice):
    """The slice of x along a dim (a view)."""
    return x[(slice(None),) * dim + (part,)]


def to_front(x, dim: int):
    """x with `dim` first, as one run of memory: x itself where it is that already."""
    return np.asarray(np.moveaxis(x, dim, 0), order="C")


def from_front(front, dim: int):
    """The inverse: the first dim back in its place, as one run of memory."""
    return np.asarray(np.moveaxis(front, 0, dim), order="C")


def row_of(front) -> int:
    """Elements that lie at each place of the first dim."""
    return int(np.prod(front.shape[1:], dtype=np.int64))
