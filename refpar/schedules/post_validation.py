"""Post-validation: the optimizer's step is taken before the gradient's norm is known, and taken back if the norm says so.

The norm is a sum over all stages, and to wait for it would bring back the bubble that zero bubble removes: in ZB-H2 each rank ends a
forward later than the one before it, and all would wait for the last.  Nearly every step needs no clipping and has no NaN.  So

    passed on       a stage adds its squares to what the stage before it sends, and sends the sum on
    hoped           it takes the step that is right if this is all, and goes on; where the sum so far forbids the step, it takes none
    handed back     the last stage knows the whole norm, and sends it back from stage to stage, while they do other work
    validated       if the step was wrong, a stage goes back to the state that it kept, and takes the clipped step; of a gradient that is
                    not finite, none

The state before the step is kept: to compute the inverse step would save its memory, and would not give back the same bits.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 4.
"""
from __future__ import annotations

import math
from typing import Callable, NamedTuple

import numpy as np

from refpar.comm.collectives import all_reduce
from refpar.config import Training
from refpar.nn.optimizer import clip_factor, clipped, squared, updated
from refpar.parallel.placement import gradient_sums, is_first
from refpar.train import State, rate_of


class Hope(NamedTuple):
    """A stage's step that was taken before the whole norm was known.

    square: of the gradients of the stages up to this one.  after: None where that alone forbids the ordinary step."""
    before: State
    grads: dict
    square: float
    after: State | None


def hoped(state: State, grads: dict, chain, mesh, training: Training) -> Hope:
    """This stage's step, taken as soon as the stages before it have told their squares.  grads: after the sums over ranks."""
    square = passed_on(squares_here(grads, chain, mesh), mesh.axis("pp"))
    allowed = math.isfinite(square) and clip_factor(math.sqrt(square), training.clip) == 1
    return Hope(state, grads, square, stepped(state, grads, training) if allowed else None)


def validated(hope: Hope, mesh, training: Training) -> tuple[State, bool]:
    """(the state after the step, was the hoped one taken back?), when the whole norm has come back to this stage."""
    return _validated(hope.before, hope.grads, math.sqrt(handed_back(hope.square, mesh.axis("pp"))), hope.after, training)


def post_validated(state: State, grads: dict, norm_of: Callable[[], float], training: Training) -> tuple[State, bool]:
    """The same where norm_of() waits for the whole norm: it is asked when the step is taken.

    What the step gives is bitwise the ordinary one's; of a norm that is not finite, the state as it was.
    """
    after = stepped(state, grads, training)
    return _validated(state, grads, norm_of(), after, training)


def _validated(before: State, grads: dict, norm: float, after: State | None, training: Training) -> tuple[State, bool]:
    if not math.isfinite(norm):
        return before, after is not None
    if clip_factor(norm, training.clip) == 1:
        return after, False
    return stepped(before, clipped(grads, norm, training.clip), training), after is not None


def stepped(state: State, grads: dict, training: Training) -> State:
    """The state after the optimizer's step with these gradients."""
    return State(*updated(state.params, grads, state.m, state.v, state.step, rate_of(state.step, training), training))


def squares_here(grads: dict, chain, mesh) -> float:
    """The squares of this stage's gradients, each counted once, over its ranks of tp."""
    dims, sums = chain.dims(), gradient_sums(chain, mesh.layout)
    mine = sum(squared(grads[layer][name]) for (layer, name), over in sums.items() if is_first(dims[layer][name], over, mesh))
    return float(all_reduce(np.array([mine], np.float64), mesh.axis("tp"))[0])


def passed_on(square: float, pp) -> float:
    """From the first stage to the last: the sum up to here.  p-1 messages of one number in all."""
    so_far = np.zeros(1)
    if pp.index > 0:
        pp.recv(so_far, pp.index - 1)
    so_far = so_far + square
    if pp.index < pp.size - 1:
        pp.send(so_far, pp.index + 1)
    return float(so_far[0])


def handed_back(square: float, pp) -> float:
    """From the last stage, which has the whole sum, to the first: p-1 messages of one number in all."""
    whole = np.array([square])
    if pp.index < pp.size - 1:
        pp.recv(whole, pp.index + 1)
    if pp.index > 0:
        pp.send(whole, pp.index - 1)
    return float(whole[0])
