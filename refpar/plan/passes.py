"""What a rank of a pipeline runs: pass by pass, which layers, of which micro-batch, and whether it hands on what it made.

A pass is a stage's work on one micro-batch, down (F) and up (B).  Where there is no pipeline, a rank runs all layers on each.
"""
from __future__ import annotations

from functools import cache
from typing import Iterator, NamedTuple

from refpar.config import Layout, Model
from refpar.nn.build import build
from refpar.parallel.stages import stage_layers
from refpar.plan.activations import Spot, kept_elements, kinds
from refpar.plan.products import left_elements
from refpar.schedules.model import piped, schedule_of


class Pass(NamedTuple):
    """A stage and a piece of the batch; the kinds of its layers; does F, does B send to another rank?

    A piece is a micro-batch, or a slice of one: of K slices, micro * K + slice."""
    stage: int
    piece: int
    kinds: tuple[str, ...]
    hands_on: bool = False
    hands_back: bool = False


@cache
def passes(model: Model, layout: Layout, micro_batches: int, pp: int) -> tuple[Pass, ...]:
    """All passes of a rank with index `pp`, in the order of their F."""
    if not piped(layout):
        return tuple(Pass(0, micro, tuple(kinds(model))) for micro in range(micro_batches))
    schedule = schedule_of(layout, micro_batches)
    of_stage = [_kinds(model, layout, schedule.depth, stage % schedule.depth) for stage in range(len(schedule.places))]

    def away(stage) -> bool:
        return stage is not None and schedule.places[stage] != pp
    return tuple(Pass(op.stage, op.micro * schedule.slices + op.slice, of_stage[op.stage], away(schedule.taker(op)),
                      away(schedule.giver(op)))
                 for slot in schedule.rows[pp] for op in slot if op.kind == "F")


def _kinds(model: Model, layout: Layout, depth: int, part: int) -> tuple[str, ...]:
    chain = build(model)
    names = [name for name, _ in chain.layers[stage_layers(chain, depth, layout.stages_by_cost)[part]]]
    return tuple(name.partition(".")[2] for name in names) + (("loss",) if part == depth - 1 else ())


def slices_of(layout: Layout, micro_batches: int) -> int:
    """Into which the layout's schedule cuts each row."""
    return schedule_of(layout, micro_batches).slices if piped(layout) else 1


class Stores(NamedTuple):
    """Elements that a rank keeps when an op of this kind has ended: from F for B, and from B for W."""
    kind: str
    saved: int
    left: int


def stores(model: Model, layout: Layout, micro_batches: int, pp: int, spots: list[Spot]) -> Iterator[Stores]:
    """Op by op.  spots: of the pieces.  Where there is no pipeline each micro-batch goes down and up, and is done."""
    sizes = {(each.stage, each.piece): [sum(of_kind(spots[each.piece], kind) for kind in each.kinds)
                                        for of_kind in (kept_elements, left_elements)]
             for each in passes(model, layout, micro_batches, pp)}
    if not piped(layout):
        yield from (store for saved, left in sizes.values() for store in (Stores("F", saved, 0), Stores("B", 0, left), Stores("W", 0, 0)))
        return
    schedule, saved, left = schedule_of(layout, micro_batches), 0, 0
    for op in (part for slot in schedule.rows[pp] for op in slot for part in op.parts):
        kept, products = sizes[op.stage, op.micro * schedule.slices + op.slice]
        saved += kept * ((op.kind == "F") - (op.kind == "B"))
        left += products * ((op.kind == "B") - (op.kind == "W"))
        yield Stores(op.kind, saved, left)
