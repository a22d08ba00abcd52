"""What is true of the runner of pipelines: its gradients are those of the model in one place, and it holds no more than it says.

The first is the master property without the optimizer, the books and the whole mesh's other axes, so that many schedules can be tried.

The second is what one schedule has over another, and equal gradients do not show it: that a rank lets go of what it no longer needs.  So
the stores of the real program are counted, op by op, from F, which keeps what backward needs, to W, which uses the last of it up.
"""
from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.mesh import Mesh, coordinates
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients
from refpar.oracle.books import spot_of, steps_of
from refpar.oracle.equal import distance
from refpar.oracle.properties_comm import require
from refpar.oracle.run import batches_of, first_state, largest_addends
from refpar.oracle.situation import Situation
from refpar.parallel.data import count_targets, reduce_gradients, sum_loss
from refpar.parallel.placement import cut, part
from refpar.plan.bubble import FORMULAS, Sizes, Times
from refpar.plan.passes import stores
from refpar.schedules.check import in_flight
from refpar.schedules.model import part_of_model, piped, schedule_of

EQUAL_TIMES = Times(1, 1, 1, 3)


class InFlight(watch.Observer):
    """most: the ops between their F and their W, at most at one time; as the runner tells, or more, where arrays are still in memory that
    F kept for backward and W has used.  elements: those kept for B and for W, each array once, at most when an F ends; and those for W
    alone, at most when a B ends."""

    def __init__(self):
        self.kept = self.products = self.most = 0
        self.left = []                                          # of each F, weak references to its arrays
        self.for_w, self.elements = {}, (0, 0)

    def held(self, kind, tree):
        if kind == "saved":                                     # told by F: what each op left for its B
            self.kept = len(tree)
            newest = tree[-1:]
            self.left.append([weakref.ref(array) for array in watch.arrays_of(newest) if array.dtype.kind == "f"])
            alive = sum(any(array() is not None for array in arrays) for arrays in self.left)
            self.most = max(self.most, self.kept + self.products, alive)
            self.elements = max(self.elements[0], watch.elements([tree, self.for_w])), self.elements[1]
        if kind == "products":                                  # told by B: what each left for its W
            self.kept, self.products, self.for_w = self.kept - 1, len(tree), tree
            self.elements = self.elements[0], max(self.elements[1], watch.elements(tree))

    def op(self, name, flops):
        self.products -= name == "W"


class Told(NamedTuple):
    """What a rank tells of one step: the whole summed loss, its gradients after the sums over ranks, and its ops and elements in flight."""
    loss: float
    grads: dict
    most: int
    elements: tuple[int, int]


def run_rank(wire, situation: Situation) -> Told:
    """The program of one rank: the work of one step."""
    mesh, model, training = Mesh(situation.layout, wire), situation.model, situation.training
    chain, work = part_of_model(model, mesh, training)
    params = first_state(situation, chain, lambda name, dims: cut(model, dims, mesh)).params
    batches = batches_of(situation, mesh, 0)
    with watch.watching(InFlight()) as flying:
        loss, grads = work(chain, params, batches, count_targets(batches, mesh))
    return Told(sum_loss(loss, mesh), reduce_gradients(grads, chain, mesh), flying.most, flying.elements)


def pipeline_equals_one_place(world, situation: Situation):
    """Loss and gradients of a step are the single process's, and every parameter has its gradient on some rank."""
    model, layout, batch, n = situation.model, situation.layout, situation.batch(0), situation.longest_sum()
    chain = build(model, situation.training.seed)
    params, dims = first_state(situation, chain).params, chain.dims()
    loss, whole = loss_and_gradients(chain, params, batch, batch.count)
    addends, seen = largest_addends(chain, params, batch), set()
    for rank, told in enumerate(world.run(run_rank, layout.ranks, situation)):
        found = [("the loss", distance(np.float64(told.loss), np.float64(loss), n))]
        for layer, group in told.grads.items():
            mine = {name: whole[layer][name][part(model, dims[layer][name], layout, coordinates(layout, rank))] for name in group}
            found += [(f"the gradient of {layer}.{name}", distance(grad, mine[name], n, addends[layer])) for name, grad in group.items()]
            seen |= {(layer, name) for name in group}
        for name, apart in found:
            require(apart <= 1, f"{name} on rank {rank} is {apart:.3g} times the bound away from the model in one place "
                                f"({situation.command()})")
    missing = {(layer, name) for layer, group in whole.items() for name in group} - seen
    require(not missing, f"no rank has a gradient of {sorted(missing)} ({situation.command()})")


def in_flight_is_the_formula(world, situation: Situation):
    """Each rank holds, at most at one time, the activations of as many ops as the schedule says; and of as many as its closed formula:
    never more, and no fewer where the formula is exact.  And of as many elements as the layers' shapes say, in all and from B to W.
    Nothing is said of a layout without a pipeline."""
    layout, micros = situation.layout, situation.training.micro_batches
    if not piped(layout):
        return
    schedule = schedule_of(layout, micros)
    row, sizes = FORMULAS[schedule.name], Sizes(layout.pp, micros, schedule.depth // layout.pp, schedule.slices)
    for rank, (_, _, counted, elements) in enumerate(world.run(run_rank, layout.ranks, situation)):
        pp = coordinates(layout, rank)["pp"]
        by_schedule, by_formula = max(in_flight(schedule)[pp], default=0), row.held(sizes, pp)
        held = f"rank {rank} holds the activations of {counted} ops"
        require(counted == by_schedule, f"{held}, and the schedule says {by_schedule} ({situation.command()})")
        require(counted == by_formula or counted < by_formula and not row.exact(sizes, EQUAL_TIMES),
                f"{held}, and the formula of {schedule.name} says {by_formula} ({situation.command()})")
        shapes = by_shapes(situation, rank)
        require(elements == shapes, f"rank {rank} keeps (for B and W, for W alone) {elements} elements, and by the shapes of its layers "
                                    f"{shapes} ({situation.command()})")


def by_shapes(situation: Situation, rank: int) -> tuple[int, int]:
    """The elements that `InFlight` counts on a rank of a pipeline, by the formulas of `plan/`."""
    pp, spots = coordinates(situation.layout, rank)["pp"], [spot_of(situation, rank, piece) for piece in steps_of(situation, rank)[0]]
    kept = list(stores(situation.model, situation.layout, situation.training.micro_batches, pp, spots))
    return max((op.saved + op.left for op in kept if op.kind == "F"), default=0), max((op.left for op in kept), default=0)
