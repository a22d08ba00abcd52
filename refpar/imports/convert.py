"""A checkpoint of another library, as a dict of arrays by name, to refpar's parameters and back, by the tables of `families.py`.

Every element is used exactly once in either direction, none is computed with, and the round trip is exact.  Gradients have the
names and shapes of their parameters, and are mapped by the same two functions.  Both copy: nothing of the argument is kept.
"""
from __future__ import annotations

import math
from typing import Iterator

import numpy as np

from refpar.config import Model
from refpar.imports.families import FAMILIES, HEAD, Array, Family
from refpar.nn.build import build


def family_of(config: Model) -> Family:
    """The class of checkpoints that holds such models."""
    for family in FAMILIES.values():
        if config.pattern == family.pattern and all(getattr(config, field) == value for field, value in family.ours.items()):
            return family
    raise ValueError(f"imports: no class of checkpoints has the pattern {'+'.join(config.pattern)} with these fields; "
                     f"those known are {', '.join(FAMILIES)}")


def arrays_of(config: Model) -> dict[str, tuple[Array, str]]:
    """Every array that a checkpoint of this model must have -> its line of the table, and the layer of ours that it belongs to."""
    layers, arrays = build(config).dims(), {}
    left = {(layer, name) for layer, group in layers.items() for name in group}
    for name, array in family_of(config).arrays.items():
        kind, pieces = array.pieces.split(": ")
        ours = [piece.partition(".")[0] for piece in pieces.split()]
        mine = [layer for layer in layers if layer.endswith(f".{kind}") and ours[0] in layers[layer]]   # one, or one of each block
        arrays |= {name.format(block): (array, layer) for block, layer in enumerate(mine)}
        left -= {(layer, piece) for layer in mine for piece in ours}
    if left:
        raise ValueError(f"imports: no class of checkpoints has a place for {'.'.join(min(left))} of this model")
    return arrays


def pieces_of(array: Array, weights: dict, config: Model) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """The parameters in one array of theirs: (view in their layout, shape that it has there)."""
    for piece in array.pieces.split(": ")[1].split():
        name, _, part = piece.partition(".")
        w = weights[name][int(part)] if part else weights[name]
        view = array.layout.view(w, config)
        merged = view.ndim - (w.ndim + array.layout.rank)                       # dims of the view that are one dim of theirs
        yield view, (math.prod(view.shape[:merged + 1]), *view.shape[merged + 1:])


def parts_of(joined: np.ndarray, lengths: list[int], dim: int) -> list[np.ndarray]:
    """Views of an array of theirs, a piece each."""
    return np.split(joined, np.cumsum(lengths)[:-1], axis=dim)


def to_refpar(state: dict[str, np.ndarray], config: Model) -> dict:
    """Arrays by their names -> layer -> parameter -> array, all of the widest dtype among them; or ValueError, one sentence."""
    arrays, state = arrays_of(config), _recognised(state, config)
    _check_names(state, arrays, "this checkpoint", "a checkpoint of this model")
    dtype = np.result_type(*state.values())
    if dtype.kind != "f":
        raise ValueError(f"imports: the arrays of this checkpoint are {dtype}, and weights must be floating-point numbers")
    params = _empty(config, dtype)
    for name, (array, layer) in arrays.items():
        views, shapes = zip(*pieces_of(array, params[layer], config))
        _check_shape(name, state[name], _joined(shapes, array.dim))
        for view, part in zip(views, parts_of(state[name], [shape[array.dim] for shape in shapes], array.dim)):
            view[...] = part.reshape(view.shape)
    return params


def from_refpar(params: dict, config: Model) -> dict[str, np.ndarray]:
    """layer -> parameter -> array -> arrays by their names; a tied head is the embedding and stands there once."""
    ours = {f"{layer}.{name}": w for layer, group in params.items() for name, w in group.items()}
    needed = {f"{layer}.{name}": w for layer, group in _empty(config, np.dtype(bool)).items() for name, w in group.items()}
    _check_names(ours, needed, "params", "this model")
    for name, w in needed.items():
        _check_shape(name, ours[name], w.shape)
    state = {}
    for name, (array, layer) in arrays_of(config).items():
        views, shapes = zip(*pieces_of(array, params[layer], config))
        joined = state[name] = np.empty(_joined(shapes, array.dim), views[0].dtype)
        for view, shape, part in zip(views, shapes, parts_of(joined, [shape[array.dim] for shape in shapes], array.dim)):
            part[...] = view.reshape(shape)
    return state


def _empty(config: Model, dtype) -> dict:
    """Parameters of this model, not yet filled."""
    return {layer: {name: np.empty(config.shape(dims), dtype) for name, dims in group.items()}
            for layer, group in build(config).dims().items()}


def _joined(shapes, dim: int) -> tuple[int, ...]:
    """The shape of arrays that are joined along `dim`."""
    return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1:])


def _recognised(state: dict[str, np.ndarray], config: Model) -> dict[str, np.ndarray]:
    """The learned arrays under their full names: without constants, and without the copy of a table that is tied."""
    family = family_of(config)
    state = {name if name.startswith(family.prefix) or name == HEAD else family.prefix + name: array
             for name, array in state.items() if not name.endswith(family.constants)}
    table = next(iter(family.arrays))
    if config.tied and HEAD in state and table in state:
        if not np.array_equal(state[HEAD], state[table]):
            raise ValueError(f"imports: {HEAD} is not {table}, and in a tied model they are one")
        del state[HEAD]
    return state


def _check_names(there, needed, what: str, whose: str):
    for name in needed:
        if name not in there:
            raise ValueError(f"imports: {what} lacks {name}; it has {len(there)} arrays where {whose} has {len(needed)}")
    for name in there:
        if name not in needed:
            raise ValueError(f"imports: {what} has {name}, which {whose} has not")


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...]):
    if array.shape != shape:
        raise ValueError(f"imports: {name} has shape {list(array.shape)}, and in this model it has {list(shape)}")
