"""What is true of resharding, between any two layouts in one world, and of the states with which a run begins.

Every element of a parameter is a number of its own, so an element in a wrong place is seen wherever it lands: a comparison of rows
as a set would pass any order of them.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from refpar import checkpoint, saves, watch
from refpar.comm.mesh import Mesh, coordinates
from refpar.comm.wire import Wire
from refpar.config import PRESETS, Layout, Model, Training
from refpar.fit import Plan, Start, begun
from refpar.nn.build import build
from refpar.nn.init import initial
from refpar.oracle.properties_comm import require, require_same
from refpar.parallel.placement import part
from refpar.parallel.reshard import Place, reshard
from refpar.parallel.stages import holders, stage_layers
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
    def legs(self) -> list[tuple[Place, Place]]:
        """The journey."""
        stops = [self.lies(layout) for layout in (WHOLE, self.before, self.after, self.before, WHOLE)]
        return list(zip(stops, stops[1:]))

    def lies(self, layout: Layout) -> Place:
        """The layers in stages, one on each rank of pp; a tied table on the first and the last."""
        chain = build(self.model)
        return Place(layout, holders(chain, stage_layers(chain, layout.pp), tuple(range(layout.pp))))


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
            leg = f"{situation}, {before.layout} to {after.layout}, rank {rank}"
            require_parts(arrays, whole, model, dims, after, rank, leg)
            promised = formula.reshard(model, dims, before, after, rank).times(size)
            require(sent == promised[:2], f"{leg}: sent {sent}, and by the formula it is {promised[:2]}")


def require_parts(arrays: dict, whole: dict, model: Model, dims: dict, place: Place, rank: int, what: str):
    """A rank has its part of every parameter of its stage, bitwise, and none beyond the layout."""
    layout, stages = place
    where = coordinates(layout, rank) if rank < layout.ranks else None
    for layer, group in dims.items():
        names = {name for name in group if where and where["pp"] in stages.get((layer, name), [where["pp"]])}
        require(arrays[layer].keys() == names, f"{what}: has {list(arrays[layer])} of {layer}, and must have {sorted(names)}")
        for name, array in arrays[layer].items():
            require_same(array, whole[layer][name][part(model, group[name], layout, where)], f"{what}: {layer}.{name}")


def plan_of(situation: ReshardSituation) -> Plan:
    """A run on the second layout."""
    return Plan(situation.model, situation.after, Training(dtype=situation.dtype), None, Path(), 1)


def beginning(wire: Wire, situation: ReshardSituation, start: Start):
    """One rank's program: the state with which it begins."""
    return begun(plan_of(situation), start, Mesh(situation.after, wire))


def fresh_is_cutting(world, situation: ReshardSituation):
    """Weights that each rank draws alone are parts of the whole model's, and so replicas are alike."""
    model, training = situation.model, plan_of(situation).training
    chain = build(model)
    whole = initial(model, chain, training.seed, np.dtype(training.dtype))
    for rank, state in enumerate(world.run(beginning, situation.after.ranks, situation, Start())):
        require_parts(state.params, whole, model, chain.dims(), Place(situation.after), rank, f"{situation}, rank {rank}, fresh")


def loading_is_cutting(world, situation: ReshardSituation):
    """What a checkpoint holds, weights and both moments and the step, is what the ranks of a mesh begin with."""
    model, dims = situation.model, build(situation.model).dims()
    stores = {kind: {layer: {name: array + place for name, array in group.items()}
                     for layer, group in tagged(model, dims, situation.dtype).items()} for place, kind in enumerate(("params", "m", "v"))}
    with TemporaryDirectory() as folder:
        path = Path(folder) / saves.name_of(5)
        checkpoint.save(path, stores | {"step": 5}, checkpoint.describe(model, WHOLE, plan_of(situation).training))
        states = world.run(beginning, situation.after.ranks, situation, Start(5, path))
    for rank, state in enumerate(states):
        require(state.step == 5, f"{situation}, rank {rank}: step {state.step} was loaded, and 5 was saved")
        for kind, whole in stores.items():
            require_parts(getattr(state, kind), whole, model, dims, Place(situation.after), rank, f"{situation}, rank {rank}, {kind}")
