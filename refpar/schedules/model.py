"""A rank's part of a model on a mesh, whatever its axes: what a step of training needs, and where parameters lie.

Where there is no pipeline, the work of a step is `data.accumulate`; else the runner obeys the layout's schedule.
"""
from __future__ import annotations

from typing import Callable

import numpy as np

from refpar.config import Layout, Model, Training
from refpar.nn.build import build
from refpar.nn.chain import Chain
from refpar.parallel.data import accumulate
from refpar.parallel.fill import model, tokens_here
from refpar.parallel.pipeline import pipelined
from refpar.reshard import Place
from refpar.parallel.schedule import Op, Schedule
from refpar.parallel.stages import holders, stage_layers
from refpar.schedules.check import check
from refpar.schedules.generate import generate


def piped(layout: Layout) -> bool:
    """Does a layout run its layers as a pipeline?"""
    return layout.pp > 1 or layout.schedule != "1f1b"


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """The layout's schedule, checked."""
    schedule = generate(layout.schedule, layout.pp, micro_batches, layout.virtual_stages or None, layout.slices or None)
    check(schedule)
    return schedule


def part_of_model(config: Model, mesh, training: Training, chain: Chain | None = None) -> tuple[Chain, Callable]:
    """(this rank's part of the chain, the work of a step on it).  `chain`: the whole, where it is not `fill.model`'s own."""
    chain = chain or model(config, mesh, training.seed)
    if not piped(mesh.layout):
        return chain, accumulate
    return on_stages(chain, schedule_of(mesh.layout, training.micro_batches), mesh, training)


def reading_of_model(config: Model, mesh, training: Training) -> Callable:
    """work(chain, params, [batch], count) -> (this rank's summed loss, nothing): forward only, by the stages of the layout."""
    layout = mesh.layout
    schedule = schedule_of(layout, training.micro_batches)
    return on_stages(model(config, mesh, training.seed), forward_only(schedule), mesh, training)[1]


def on_stages(chain: Chain, schedule: Schedule, mesh, training: Training) -> tuple[Chain, Callable]:
    """The same under any schedule."""
    return pipelined(chain, schedule, mesh, tokens_here(mesh), np.dtype(training.dtype), mesh.layout.stages_by_cost)


def forward_only(schedule: Schedule) -> Schedule:
    """One batch down the stages of a schedule's first copy, where they are."""
    places = schedule.places[:schedule.depth]
    rows = [tuple((Op("F", stage, 0),) for stage, place in enumerate(places) if place == rank) for rank in range(len(schedule.rows))]
    return Schedule("forward-only", tuple(rows), places, 1, tuple(map(len, rows)), backward=False)


def place_of(config: Model, layout: Layout, training: Training) -> Place:
    """Where the model's parameters lie."""
    if not piped(layout):
        return Place(layout)
    schedule, chain = schedule_of(layout, training.micro_batches), build(config)
    return Place(layout, holders(chain, stage_layers(chain, schedule.depth, layout.stages_by_cost), schedule.places))
