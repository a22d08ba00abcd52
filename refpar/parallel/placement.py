"""Which part of a parameter a rank holds, and over which axes its gradient is summed.

Both follow from the dims that the layer declared, such as {"q": "D HE/tp"}, and from where the parameter stands: inside the
seams of its layer, or outside them.  No list of parameters is kept anywhere.
"""
from __future__ import annotations

import math

import numpy as np

from refpar.comm.collectives import all_reduce
from refpar.config import Model, share


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


def cut(model: Model, dims: str, mesh) -> tuple[slice, ...]:
    """This rank's slice of each dim of a whole parameter."""
    return tuple(share(size, *((mesh.axis(axis).size, mesh.axis(axis).index) if axis else (1, 0)), unit)
                 for word in dims.split() for (size, unit), axis in [(model.dim(word), axis_of(word))])


def held_share(model: Model, dims: dict[str, dict[str, str]], layout) -> float:
    """The largest share of all parameters that the placements allow one rank to hold."""
    whole = held = 0
    for words in (dims[layer][name] for layer in dims for name in dims[layer]):
        whole += math.prod(model.shape(words))
        held += math.prod(-(-model.dim(word)[0] // model.dim(word)[1] // _ranks(word, layout)) * model.dim(word)[1]
                          for word in words.split())
    return held / whole


def _ranks(word: str, layout) -> int:
    axis = axis_of(word)
    return getattr(layout, axis) if axis else 1


def inside_of(chain) -> dict[tuple[str, str], bool]:
    """(layer, parameter) -> does it stand inside the layer's seams?"""
    return {(name, p): p in layer.inside for name, layer in chain.layers for p in layer.dims if (name, p) not in chain.ties}


def gradient_axes(chain) -> dict[tuple[str, str], tuple[str, ...]]:
    """(layer, parameter) -> the axes over which its gradient is summed."""
    dims = chain.dims()
    return {(layer, p): summed_axes(dims[layer][p], inside) for (layer, p), inside in inside_of(chain).items()}


def squared_norm(grads: dict, chain, mesh) -> float:
    """The squared norm of the whole gradient.  After the sums of law 2 a gradient is the same on every rank of every axis but
    those that cut its parameter: only over these are the squares added."""
    squares: dict[tuple[str, ...], float] = {}
    for layer, dims in chain.dims().items():
        for name, words in dims.items():
            axes = shard_axes(words)
            flat = grads[layer][name].astype(np.float64, copy=False).ravel()
            squares[axes] = squares.get(axes, 0.0) + float(flat @ flat)
    return sum(_sum_over(square, axes, mesh) for axes, square in squares.items())


def _sum_over(square: float, axes: tuple[str, ...], mesh) -> float:
    for axis in axes:
        square = float(all_reduce(np.array([square]), mesh.axis(axis))[0])
    return square
