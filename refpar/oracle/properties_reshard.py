"""What is true of resharding, between any two layouts in one world.

Every element of a parameter is a number of its own, so an element in a wrong place is seen wherever it lands: a comparison of rows
as a set would pass any order of them.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from refpar import watch
from refpar.comm.mesh import coordinates
from refpar.comm.wire import Wire
from refpar.config import PRESETS, Layout, Model
from refpar.nn.build import build
from refpar.oracle.properties_comm import require, require_same
from refpar.parallel.placement import part
from refpar.parallel.reshard import reshard
from refpar.plan import reshard as formula

WHOLE = Layout()


@dataclass(frozen=True)
class ReshardSituation:
    """A model's parameters go from one rank to a layout, to another, back, and to one rank again."""
    model: Model = PRESETS["llama-tiny"]
    before: Layout = Layout(tp=2)
    after: Layout = Layout(tp=3)
    dtype: str = "float64"

    @property
    def ranks(self) -> int:
        """Of the world: the larger layout fills it."""
        return max(self.before.ranks, self.after.ranks)

    @property
    def legs(self) -> list[tuple[Layout, Layout]]:
        """The journey."""
        return [(WHOLE, self.before), (self.before, self.after), (self.after, self.before), (self.before, WHOLE)]


def tagged(model: Model, dims: dict, dtype) -> dict:
    """Whole parameters whose elements are numbered through, over all of them."""
    first, found = 0, {layer: {} for layer in dims}
    for layer, group in dims.items():
        for name, text in group.items():
            shape = model.shape(text)
            found[layer][name] = np.arange(first, first + math.prod(shape)).reshape(shape).astype(dtype)
            first += math.prod(shape)
    return found


def journey(wire: Wire, situation: ReshardSituation) -> list[tuple[dict, tuple[int, int]]]:
    """One rank's program: after each leg what it holds, and the messages and bytes that it sent."""
    model, told = situation.model, []
    dims = build(model).dims()
    arrays = tagged(model, dims, situation.dtype) if wire.rank == 0 else {}
    for before, after in situation.legs:
        with watch.watching(watch.Ledger()) as ledger:
            arrays = reshard(arrays, model, dims, before, after, wire, situation.dtype)
        told.append((arrays, ledger.sent("world", "reshard")))
    return told


def reshard_is_cutting(world, situation: ReshardSituation):
    """On every leg each rank gets what cutting the whole gives it, and sends what the formula says; so there and back, and whole
    to whole, nothing has moved."""
    model = situation.model
    dims = build(model).dims()
    whole, size = tagged(model, dims, situation.dtype), np.dtype(situation.dtype).itemsize
    for rank, told in enumerate(world.run(journey, situation.ranks, situation)):
        for (before, after), (arrays, sent) in zip(situation.legs, told):
            leg = f"{situation}, {before} to {after}, rank {rank}"
            for layer, group in dims.items():
                require(arrays[layer].keys() == (group.keys() if rank < after.ranks else set()), f"{leg}: has {list(arrays[layer])}")
                for name, array in arrays[layer].items():
                    mine = part(model, group[name], after, coordinates(after, rank))
                    require_same(array, whole[layer][name][mine], f"{leg}: {layer}.{name}")
            promised = formula.reshard(model, dims, before, after, rank).times(size)
            require(sent == promised[:2], f"{leg}: sent {sent}, and by the formula it is {promised[:2]}")
