"""Judge a run: is the sharded run equal to the whole one, did each rank hold its share, send its bytes and do its work, no more?

Every step is judged from the state in which the sharded run stood before it, put together from the ranks' shards, so a rounding
error is judged once, by the bound of one step, and is not blown up by the steps that follow (AdamW divides small gradients by small
numbers).  The sharded run itself carries its state, so what is lost between two steps shows.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from refpar.comm.mesh import coordinates
from refpar.oracle.books import Books, books_of
from refpar.oracle.bound import distance_within, step_bounds
from refpar.oracle.equal import bound, distance
from refpar.oracle.run import Run, Step, Whole, fresh, run_sharded, whole_step
from refpar.oracle.situation import Situation
from refpar.parallel.placement import part
from refpar.train import State, rate_of

STORES = {"params": "weights", "m": "optimizer", "v": "optimizer"}      # of the state -> the kind of error


class Judgement(NamedTuple):
    """What verify prints of one situation.  Errors are in units of the bound: at most 1 is equal."""
    errors: dict[str, float]                # loss, input, gradient, norm, weights, optimizer -> the largest error of any step
    wrong: str | None                       # the first wrong tensor and its rank, in words
    books: Books                            # what was held, sent and computed, beside the formulas

    @property
    def complaint(self) -> str | None:
        """One sentence on the first thing that is wrong; None where all is right."""
        return self.wrong or self.books.wrong


class Parts:
    """Which part of each parameter each rank holds."""

    def __init__(self, situation: Situation, dims: dict[str, dict[str, str]]):
        self.model, self.layout, self.dims, self.dtype = situation.model, situation.layout, dims, situation.training.dtype
        self.where = [coordinates(self.layout, rank) for rank in range(self.layout.ranks)]

    def slices(self, rank: int, layer: str, name: str) -> tuple[slice, ...]:
        """Of each dim of the parameter."""
        return part(self.model, self.dims[layer][name], self.layout, self.where[rank])

    def each(self):
        """(layer, parameter), all of them."""
        return ((layer, name) for layer, group in self.dims.items() for name in group)

    def assembled(self, states: list[State | None]) -> State:
        """The whole state, of the shards that ranks told."""
        whole: dict[str, dict] = {store: {layer: {} for layer in self.dims} for store in STORES}
        told = [(rank, state) for rank, state in enumerate(states) if state is not None]
        for store in STORES:
            for layer, name in self.each():
                array = whole[store][layer][name] = np.full(self.model.shape(self.dims[layer][name]), np.nan, self.dtype)
                for rank, state in told:
                    if name in getattr(state, store).get(layer, {}):
                        array[self.slices(rank, layer, name)] = getattr(state, store)[layer][name]
        return State(**whole, step=told[0][1].step)


def judge(world, situation: Situation) -> Judgement:
    """Run the situation on the world's ranks, and judge it here."""
    return weigh(situation, world.run(run_sharded, situation.layout.ranks, situation))


def weigh(situation: Situation, runs: list[Run]) -> Judgement:
    """Judge what the ranks told of their run."""
    chain, state = fresh(situation)
    parts, wholes = Parts(situation, chain.dims()), []
    errors: dict[str, float] = {}
    wrong = None
    for number in range(situation.training.steps):
        steps, whole = [run.steps[number] for run in runs], whole_step(situation, chain, state)
        found = list(weigh_step(situation, parts, steps, state, whole))
        for kind, name, rank, error in found:
            errors[kind] = max(errors.get(kind, 0.0), error)
        wrong = wrong or first_wrong(number, found) or first_replica_apart(number, parts, runs)
        state = parts.assembled([step.state for step in steps])
        wholes.append(whole.ledger)
    return Judgement(errors, wrong, books_of(situation, chain, wholes, runs))


def weigh_step(situation: Situation, parts: Parts, steps: list[Step], before: State, whole: Whole):
    """(kind, tensor, rank, error in units of the bound) of everything that one step gave."""
    n, number = situation.longest_sum(), np.dtype(situation.training.dtype).type
    for rank, step in enumerate(steps):
        yield "loss", "the count of targets", rank, 0.0 if step.count == whole.step.count else math.inf
        yield "loss", "the loss", rank, distance(number(step.loss), number(whole.step.loss), n)
    yield from weigh_input(steps, whole.step, n)
    for rank, step in enumerate(steps):
        yield "norm", "the gradient's norm", rank, distance(number(step.norm), number(whole.step.norm), n)
    lost = set(parts.each()).difference(*map(held_by, steps))
    yield "gradient", f"{sorted(lost)} held by nobody", 0, math.inf if lost else 0.0
    limits = limits_of_step(situation, before, whole, n)
    for rank, step in enumerate(steps):
        for layer, name in held_by(step):
            mine = parts.slices(rank, layer, name)
            yield "gradient", f"the gradient of {layer}.{name}", rank, distance(
                step.gradients[layer][name], whole.step.gradients[layer][name][mine], n, whole.addends[layer])
            for (store, kind), limit in zip(STORES.items(), limits):
                reached = getattr(whole.step.state, store)[layer][name]
                yield kind, f"{store} {layer}.{name} after the step", rank, distance_within(
                    getattr(step.state, store)[layer][name], reached[mine],
                    np.broadcast_to(limit[layer][name], reached.shape)[mine])


def held_by(step: Step) -> list[tuple[str, str]]:
    """(layer, parameter) of what a rank told of."""
    return [(layer, name) for layer, group in step.state.params.items() for name in group] if step.state else []


def weigh_input(steps: list[Step], whole: Step, n: int):
    """The gradient of the first layer's input: each rank's tokens beside theirs in the whole; and every token is somebody's."""
    scale = float(np.max(np.abs(whole.input_gradient), initial=0.0))
    tokens = np.zeros_like(whole.input_gradient)
    tokens[whole.index] = whole.input_gradient                                      # [rows*S, D]
    held = np.zeros(len(tokens), bool)
    for rank, step in enumerate(steps):
        held[step.index] = True
        yield "input", "the gradient of the first layer's input", rank, distance(step.input_gradient, tokens[step.index], n, scale)
    yield "input", "the tokens of all ranks together", 0, 0.0 if held.all() else math.inf


def limits_of_step(situation: Situation, before: State, whole: Whole, n: int) -> tuple[dict, dict, dict]:
    """How far params, m and v after the step may lie from the single process's, element by element."""
    bounds = {layer: {name: bound(grad.dtype, n, whole.addends[layer]) for name, grad in group.items()}
              for layer, group in whole.step.gradients.items()}
    return step_bounds(before, whole.step.gradients, bounds, rate_of(before.step, situation.training), situation.training)


def first_wrong(number: int, found) -> str | None:
    """The first tensor beyond its bound, in words."""
    for _, name, rank, error in found:
        if not error <= 1:
            return f"step {number + 1}: {name} on rank {rank} is {error:.3g} times the bound away from the single process"
    return None


def first_replica_apart(number: int, parts: Parts, runs: list[Run]) -> str | None:
    """The first tensor that two ranks should hold bitwise alike and do not: all ranks with the same part of a parameter."""
    first: dict = {}
    for rank, run in enumerate(runs):
        for (store, layer, name), fingerprint in run.digests[number].items():
            place = store, layer, name, *((piece.start, piece.stop) for piece in parts.slices(rank, layer, name))
            other, same = first.setdefault(place, (rank, fingerprint))
            if fingerprint != same:
                return f"step {number + 1}: {store} {layer}.{name} on rank {rank} is not bitwise what it is on rank {other}"
    return None
