"""Judge a run: is the sharded run equal to the whole one, did each rank hold no more than its share, was a byte sent too many?

Every step is judged from the state in which the sharded run stood before it, so a rounding error is judged once, by the bound of
one step, and is not blown up by the steps that follow (AdamW divides small gradients by small numbers).  The sharded run itself
carries its state, so what is lost between two steps shows.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.corpus import micro_batches
from refpar.oracle.bound import distance_within, step_bounds
from refpar.oracle.equal import bound, distance, leaves
from refpar.oracle.run import Run, Step, fresh, run_sharded, whole_step
from refpar.oracle.situation import Situation
from refpar.parallel.data import buckets
from refpar.parallel.placement import held_share
from refpar.plan.promise import all_reduce_sends
from refpar.train import rate_of


class Judgement(NamedTuple):
    """What verify prints of one situation.  Errors are in units of the bound: at most 1 is equal."""
    errors: dict[str, float]                # loss, input, gradient, norm, weights, optimizer -> the largest error of any step
    wrong: str | None                       # the first wrong tensor and its rank, in words
    held: dict[str, tuple[float, float]]    # weight, saved -> the largest share any rank held, and what its placements allow
    sent: dict[str, tuple[int, int]]        # axis -> bytes sent by all ranks, counted and by formula

    @property
    def complaint(self) -> str | None:
        """One sentence on the first thing that is wrong; None where all is right."""
        if self.wrong:
            return self.wrong
        for kind, (share, allowed) in self.held.items():
            if share > allowed * (1 + 1e-12):
                return f"a rank held {share:.1%} of the elements of kind {kind}, and its placements allow {allowed:.1%}"
        for axis, (counted, formula) in self.sent.items():
            if counted != formula:
                return f"{counted} bytes were sent on {axis}, and by the formula it is {formula}"
        return None


def judge(world, situation: Situation) -> Judgement:
    """Run the situation on the world's ranks, and judge it here."""
    return weigh(situation, world.run(run_sharded, situation.layout.ranks, situation))


def weigh(situation: Situation, runs: list[Run]) -> Judgement:
    """Judge what the ranks told of their run."""
    chain, state = fresh(situation)
    errors: dict[str, float] = {}
    wrong, whole_saved = None, 0
    for number in range(situation.training.steps):
        with watch.watching(watch.Ledger()) as ledger:
            whole = whole_step(situation, chain, state)
        whole_saved = max(whole_saved, ledger.peak["saved"])
        found = list(weigh_step(situation, [run.steps[number] for run in runs], state, whole))
        for kind, name, rank, error in found:
            errors[kind] = max(errors.get(kind, 0.0), error)
        wrong = wrong or first_wrong(number, found) or first_replica_apart(number, runs)
        state = runs[0].steps[number].state
    return Judgement(errors, wrong, shares_held(situation, chain, runs, whole_saved),
                     bytes_sent(situation, chain, state.params, runs))


def weigh_step(situation: Situation, steps: list[Step], before, whole: Step):
    """(kind, tensor, rank, error in units of the bound) of everything that one step gave."""
    n, number = situation.longest_sum(), np.dtype(situation.training.dtype).type
    for rank, step in enumerate(steps):
        yield "loss", "the count of targets", rank, 0.0 if step.count == whole.count else math.inf
        yield "loss", "the loss", rank, distance(number(step.loss), number(whole.loss), n)
    at = 0
    for rank, step in enumerate(steps):
        rows = whole.input_gradient[at:at + len(step.input_gradient)]
        scale = float(np.max(np.abs(whole.input_gradient), initial=0.0))
        yield "input", "the gradient of the first layer's input", rank, distance(step.input_gradient, rows, n, scale)
        at += len(rows)
    first = steps[0]
    whole_gradients = dict(leaves(whole.gradients))
    for name, gradient in leaves(first.gradients):
        yield "gradient", f"the gradient of {name}", 0, distance(gradient, whole_gradients[name], n,
                                                                   whole.addends[name.rpartition(".")[0]])
    for rank, step in enumerate(steps):
        yield "norm", "the gradient's norm", rank, distance(number(step.norm), number(whole.norm), n)
    bounds = {layer: {name: bound(grad.dtype, n, whole.addends[layer]) for name, grad in group.items()}
              for layer, group in whole.gradients.items()}
    limits = step_bounds(before, whole.gradients, bounds, rate_of(before.step, situation.training), situation.training)
    for kind, store, limit in zip(("weights", "optimizer", "optimizer"), ("params", "m", "v"), limits):
        reached, allowed = dict(leaves(getattr(whole.state, store))), dict(leaves(limit))
        for name, array in leaves(getattr(first.state, store)):
            yield kind, f"{store} {name} after the step", 0, distance_within(array, reached[name], allowed[name])


def first_wrong(number: int, found) -> str | None:
    """The first tensor beyond its bound, in words."""
    for _, name, rank, error in found:
        if not error <= 1:
            return f"step {number + 1}: {name} on rank {rank} is {error:.3g} times the bound away from the single process"
    return None


def first_replica_apart(number: int, runs: list[Run]) -> str | None:
    """The first tensor that two ranks should hold bitwise alike and do not."""
    for rank, run in enumerate(runs):
        for name, fingerprint in run.digests[number].items():
            if fingerprint != runs[0].digests[number][name]:
                return f"step {number + 1}: {name} on rank {rank} is not bitwise what it is on rank 0"
    return None


def shares_held(situation: Situation, chain, runs: list[Run], whole_saved: int) -> dict[str, tuple[float, float]]:
    """weight and saved -> (largest share of the whole that a rank held, share that its placements allow)."""
    weights = sum(math.prod(situation.model.shape(dims)) for group in chain.dims().values() for dims in group.values())
    training, dp = situation.training, situation.layout.dp
    rows = [part.stop - part.start for number in range(training.steps) for rank in range(dp)
            for part in micro_batches(situation.rows(number), dp, rank, training.micro_batches)]
    most = max(situation.rows(number) for number in range(training.steps))
    return {"weight": (max(run.peak["weight"] for run in runs) / weights,
                       held_share(situation.model, chain.dims(), situation.layout)),
            "saved": (max(run.peak["saved"] for run in runs) / whole_saved, max(rows) / most)}


def bytes_sent(situation: Situation, chain, params: dict, runs: list[Run]) -> dict[str, tuple[int, int]]:
    """Axis -> (bytes sent by all ranks, the formulas of the algorithms that the table chooses: for the count of targets, for each
    bucket of gradients, and for the loss)."""
    counted: dict[str, int] = {}
    for run in runs:
        for (axis, _), (_, size) in run.sent.items():
            counted[axis] = counted.get(axis, 0) + size
    dtype, dp = np.dtype(situation.training.dtype), situation.layout.dp
    sums = [(1, np.int64), (1, np.float64)]
    sums += [(bucket.bytes // dtype.itemsize, dtype) for bucket in buckets(params, chain, situation.layout)]
    formula = situation.training.steps * sum(all_reduce_sends(rank, elements, dp, of).elements for elements, of in sums
                                             for rank in range(dp))
    return {axis: (size, formula) for axis, size in counted.items()} or {"dp": (0, formula)}
