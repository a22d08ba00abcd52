"""Which part of a parameter a rank holds, and over which ranks its gradient is summed.

Both follow from the dims that the layer declared, such as {"q": "D HE/tp"}, and from where the parameter stands: inside the
seams of its layer, or outside them.  No list of parameters is kept anywhere.

A part is whole units of a dim (`Model.part`).  Where tp has more ranks than K or G, the groups of heads, each group has a *run* of
ranks: they share its heads, and each holds its keys' and values' weights, or its B and C.  So do their gradients: they are summed
over the run, and the norm counts them once.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar.comm.collectives import all_reduce
from refpar.config import Layout, Model, run_of
from refpar.nn.optimizer import squared

SHARED = "KG"           # dims of which a run's ranks hold the same part


class Sum(NamedTuple):
    """The ranks over which a gradient is summed: those on `axes`, and among them only, of tp, the run that shares one of `units`,
    and of pp, the `stages` that hold the parameter."""
    axes: tuple[str, ...]
    units: int | None = None
    stages: tuple[int, ...] | None = None

    def on(self, mesh):
        """These ranks, as one axis of the mesh."""
        return mesh.axis(*self.axes, **self.only(mesh))

    def only(self, mesh) -> dict:
        """Axis -> the indices on it that share the parameter, where these are not all."""
        runs = {} if self.units is None else {"tp": run_of(self.units, mesh.layout.tp, mesh.coordinates()["tp"])[1]}
        return runs if self.stages is None else runs | {"pp": self.stages}


def axis_of(word: str) -> str | None:
    """The axis that cuts a dim: "HE/tp" -> "tp", "D" -> None."""
    return word.partition("/")[2] or None


def shard_axes(dims: str) -> tuple[str, ...]:
    """The axes that cut a parameter: "D HE/tp" -> ("tp",)."""
    return tuple(axis for axis in map(axis_of, dims.split()) if axis)


def summed_axes(dims: str, inside: bool, sequence_parallel: bool = False) -> tuple[str, ...]:
    """The axes over which a parameter's gradient is summed (law 2): those over which the activations it meets are sharded,
    less the axes of its own shards.  Activations are cut over dp and cp everywhere, and over tp inside the seams; outside
    them only under sequence parallelism."""
    met = ("dp", "cp", "tp") if inside or sequence_parallel else ("dp", "cp")
    return tuple(axis for axis in met if axis not in shard_axes(dims))


def shared_units(model: Model, dims: str, layout: Layout) -> int | None:
    """How many units of a parameter are each held by a whole run of tp ranks; None where no rank shares any."""
    units = [model.families(word) for word in dims.split() if axis_of(word) == "tp" and word[0] in SHARED]
    return units[0] if units and units[0] < layout.tp else None


def cut(model: Model, dims: str, mesh) -> tuple[slice, ...]:
    """This rank's slice of each dim of a whole parameter."""
    return part(model, dims, mesh.layout, mesh.coordinates())


def part(model: Model, dims: str, layout: Layout, where: dict[str, int]) -> tuple[slice, ...]:
    """The same of the rank that stands at `where`."""
    return tuple(model.part(word, getattr(layout, axis), where[axis]) if axis else slice(0, model.dim(word)[0])
                 for word in dims.split() for axis in [axis_of(word)])


def inside_of(chain) -> dict[tuple[str, str], bool]:
    """(layer, parameter) -> does it stand inside the layer's seams?"""
    layers = dict(chain.layers)
    tied = {owner: mine in layers[layer].inside for (layer, mine), owner in chain.ties.items()}
    return tied | {(name, p): p in layer.inside for name, layer in chain.layers for p in layer.dims if (name, p) not in chain.ties}


def gradient_sums(chain, layout: Layout) -> dict[tuple[str, str], Sum]:
    """(layer, parameter) -> the ranks over which its gradient is summed."""
    dims = chain.dims()
    return {(layer, p): Sum(summed_axes(dims[layer][p], inside, layout.sp), shared_units(chain.model, dims[layer][p], layout),
                            chain.holders.get((layer, p)))
            for (layer, p), inside in inside_of(chain).items()}


def squared_norm(grads: dict, chain, mesh) -> float:
    """The squared norm of the whole gradient: the squares that ranks give, added over the axes that cut the model."""
    return float(all_reduce(np.array([squares_here(grads, chain, mesh)]), mesh.axis("pp", "tp"))[0])


def squares_here(grads: dict, chain, mesh) -> float:
    """This rank's squares.  After the sums of law 2 a gradient is the same on all ranks that hold its part of the parameter: the
    first of them gives its squares."""
    dims, sums = chain.dims(), gradient_sums(chain, mesh.layout)
    return sum((squared(grads[layer][name]) for (layer, name), over in sums.items() if is_first(dims[layer][name], over, mesh)), 0.0)


def is_first(dims: str, over: Sum, mesh) -> bool:
    """Is this rank the first, on tp and pp, of those that hold its part of a parameter?"""
    here = mesh.coordinates()
    first = {"tp": here["tp"] if "tp" in shard_axes(dims) else 0, "pp": 0}
    first |= {axis: min(indices) for axis, indices in over.only(mesh).items()}
    return all(here[axis] == index for axis, index in first.items())
