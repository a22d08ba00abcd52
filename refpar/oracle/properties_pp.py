"""What is true of a pipeline beside the master property: how much it holds in flight.

Equal gradients do not show that a rank let go of what it no longer needs, which is what one schedule has over another.  So the stores of
the real program are counted, op by op, from F, which keeps what backward needs, to W, which uses the last of it up.
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm.mesh import Mesh, coordinates
from refpar.nn.init import initial
from refpar.oracle.properties_comm import require
from refpar.oracle.run import batches_of
from refpar.oracle.situation import Situation
from refpar.parallel.data import count_targets
from refpar.parallel.placement import cut
from refpar.plan.bubble import FORMULAS, Sizes, Times
from refpar.schedules.check import in_flight
from refpar.schedules.model import part_of_model, piped, schedule_of

EQUAL_TIMES = Times(1, 1, 1, 3)


class InFlight(watch.Observer):
    """most: the ops between their F and their W, at most at one time."""

    def __init__(self):
        self.kept = self.products = self.most = 0

    def held(self, kind, tree):
        if kind == "saved":                                     # told by F: what each op left for its B
            self.kept = len(tree)
            self.most = max(self.most, self.kept + self.products)
        if kind == "products":                                  # told by B: what each left for its W
            self.kept, self.products = self.kept - 1, len(tree)

    def op(self, name, flops):
        self.products -= name == "W"


def run_rank(wire, situation: Situation) -> int:
    """The program of one rank: the work of one step, and how much of it was in flight."""
    mesh, model, training = Mesh(situation.layout, wire), situation.model, situation.training
    chain, work = part_of_model(model, mesh, training)
    params = initial(model, chain, training.seed, np.dtype(training.dtype), lambda name, dims: cut(model, dims, mesh))
    batches = batches_of(situation, mesh, 0)
    with watch.watching(InFlight()) as stores:
        work(chain, params, batches, count_targets(batches, mesh))
    return stores.most


def in_flight_is_the_formula(world, situation: Situation):
    """Each rank holds, at most at one time, the activations of as many ops as the schedule says; and of as many as its closed formula:
    never more, and no fewer where the formula is exact.  Nothing is said of a layout without a pipeline."""
    layout, micros = situation.layout, situation.training.micro_batches
    if not piped(layout):
        return
    schedule = schedule_of(layout, micros)
    row, sizes = FORMULAS[schedule.name], Sizes(layout.pp, micros, schedule.depth // layout.pp, schedule.slices)
    for rank, counted in enumerate(world.run(run_rank, layout.ranks, situation)):
        pp = coordinates(layout, rank)["pp"]
        by_schedule, by_formula = max(in_flight(schedule)[pp], default=0), row.held(sizes, pp)
        held = f"rank {rank} holds the activations of {counted} ops"
        require(counted == by_schedule, f"{held}, and the schedule says {by_schedule} ({situation.command()})")
        require(counted == by_formula or counted < by_formula and not row.exact(sizes, EQUAL_TIMES),
                f"{held}, and the formula of {schedule.name} says {by_formula} ({situation.command()})")
