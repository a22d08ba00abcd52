"""Resharding: parameters that lie on the ranks as one layout says go to where another layout wants them.

A parameter lies in *blocks*, the parts of it that ranks hold: replicas, and the ranks of a run, hold the same block.  A rank's part
under the other layout is a box that meets some of the blocks.  What the rank holds of it already it copies; the rest comes from
each block's first holder.  So every element that a rank lacks reaches it once, whatever the two layouts are:

    received    elements of my new part, less those of my old part; a message from each block that I lack and my new part meets

Saving is resharding to one rank, loading the way back.  What mathematics names apart is a parameter apart, so a part is one box, and
no order of fused blocks can be lost.  Neither layout need have as many ranks as the world: ranks beyond it hold nothing.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.mesh import coordinates
from refpar.config import Layout, Model
from refpar.parallel.placement import part

Box = tuple[range, ...]         # of a parameter: a range of each dim
Name = tuple[str, str]          # of a parameter: its layer and its own


class Place(NamedTuple):
    """Where a model lies: a layout, and the indices of pp that hold a parameter where these are not all (`stages.holders`)."""
    layout: Layout
    stages: dict[Name, tuple[int, ...]] = {}


def held(model: Model, name: Name, dims: str, place: Place, rank: int) -> Box | None:
    """What a rank of the world holds of a parameter; None where it has none of it.  Only here is it decided who holds what."""
    layout = place.layout
    if rank >= layout.ranks:
        return None
    where = coordinates(layout, rank)
    if where["pp"] not in place.stages.get(name, range(layout.pp)):
        return None
    return tuple(range(piece.start, piece.stop) for piece in part(model, dims, layout, where))


def holders(model: Model, name: Name, dims: str, place: Place) -> dict[Box, list[int]]:
    """Every block of a parameter, and the ranks that hold it, rising."""
    found: dict[Box, list[int]] = {}
    for rank in range(place.layout.ranks):
        box = held(model, name, dims, place, rank)
        if box is not None:
            found.setdefault(box, []).append(rank)
    return found


class Move(NamedTuple):
    """A box goes from one rank to another; to the same, if it has it."""
    source: int
    to: int
    box: Box


def moves(model: Model, name: Name, dims: str, before: Place, after: Place) -> list[Move]:
    """How a parameter gets from place to place, the same list on every rank."""
    blocks = holders(model, name, dims, before)
    return [Move(to if to in ranks else ranks[0], to, box)
            for wanted, takers in holders(model, name, dims, after).items() for to in takers
            for block, ranks in blocks.items() for box in [overlap(wanted, block)] if all(box)]


def overlap(a: Box, b: Box) -> Box:
    """The box that two have in common: empty ranges where there is none."""
    return tuple(range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b))


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box stands in an array that holds `outer`."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(box, outer))


def reshard(arrays: dict, model: Model, dims: dict, before: Place, after: Place, wire, dtype) -> dict:
    """layer -> parameter -> what this rank holds under `before` -> the same under `after`, in arrays of its own.

    dims: layer -> parameter -> its dims, on every rank of the wire; a rank that holds nothing of a parameter has no entry for it.
    """
    there: dict = {layer: {} for layer in dims}
    with watch.errand("world", "reshard"):
        for name, text in (((layer, p), text) for layer, group in dims.items() for p, text in group.items()):
            layer, p = name
            was, wanted = (held(model, name, text, place, wire.rank) for place in (before, after))
            into = None if wanted is None else np.empty([len(side) for side in wanted], dtype)
            array = None if was is None else arrays[layer][p]
            _travel(array, was, into, wanted, moves(model, name, text, before, after), wire, dtype)
            there[layer] |= {} if into is None else {p: into}
    return there


def _travel(array, was, into, wanted, plan: list[Move], wire, dtype):
    """One parameter: what I have of it goes to where it is wanted, and `into` is filled."""
    leaving, arriving = [], []
    for source, to, box in plan:
        if source == to == wire.rank:
            into[within(box, wanted)] = array[within(box, was)]
        elif source == wire.rank:
            leaving.append(wire.isend(np.asarray(array[within(box, was)], order="C"), to))
        elif to == wire.rank:
            arriving.append((wire.irecv(np.empty([len(side) for side in box], dtype), source), box))
    for request, box in arriving:
        request.wait()
        into[within(box, wanted)] = request.array
    for request in leaving:
        request.wait()
