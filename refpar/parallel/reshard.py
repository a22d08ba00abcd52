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


def held(model: Model, layer: str, dims: str, layout: Layout, rank: int) -> Box | None:
    """What a rank of the world holds of a layer's parameter; None where it has no place for it.  Only here is it decided who does."""
    if rank >= layout.ranks:
        return None
    return tuple(range(piece.start, piece.stop) for piece in part(model, dims, layout, coordinates(layout, rank)))


def holders(model: Model, layer: str, dims: str, layout: Layout) -> dict[Box, list[int]]:
    """Every block of a parameter, and the ranks that hold it, rising."""
    found: dict[Box, list[int]] = {}
    for rank in range(layout.ranks):
        box = held(model, layer, dims, layout, rank)
        if box is not None:
            found.setdefault(box, []).append(rank)
    return found


class Move(NamedTuple):
    """A box goes from one rank to another; to the same, if it has it."""
    source: int
    to: int
    box: Box


def moves(model: Model, layer: str, dims: str, before: Layout, after: Layout) -> list[Move]:
    """How a parameter gets from layout to layout, the same list on every rank."""
    blocks = holders(model, layer, dims, before)
    return [Move(to if to in ranks else ranks[0], to, box)
            for wanted, takers in holders(model, layer, dims, after).items() for to in takers
            for block, ranks in blocks.items() for box in [overlap(wanted, block)] if all(box)]


def overlap(a: Box, b: Box) -> Box:
    """The box that two have in common: empty ranges where there is none."""
    return tuple(range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b))


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box stands in an array that holds `outer`."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(box, outer))


def reshard(arrays: dict, model: Model, dims: dict, before: Layout, after: Layout, wire, dtype) -> dict:
    """layer -> parameter -> what this rank holds under `before` -> the same under `after`, in arrays of its own.

    dims: layer -> parameter -> its dims, on every rank of the wire; a rank that holds nothing of a parameter has no entry for it.
    """
    there: dict = {layer: {} for layer in dims}
    with watch.errand("world", "reshard"):
        for layer, group in dims.items():
            for name, text in group.items():
                was, wanted = (held(model, layer, text, layout, wire.rank) for layout in (before, after))
                into = None if wanted is None else np.empty([len(side) for side in wanted], dtype)
                _travel(None if was is None else arrays[layer][name], was, into, wanted,
                        moves(model, layer, text, before, after), wire, dtype)
                there[layer] |= {} if into is None else {name: into}
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
