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
from typing import NamedTuple

import numpy as np

from refpar.comm.collectives import all_reduce
from refpar.config import Training
from refpar.nn.optimizer import clip_factor, clipped, updated
from refpar.parallel.placement import squares_here
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
    mine = all_reduce(np.array([squares_here(grads, chain, mesh)]), mesh.axis("tp"))
    square = passed_on(float(mine[0]), mesh.axis("pp"))
    allowed = math.isfinite(square) and clip_factor(math.sqrt(square), training.clip) == 1
    return Hope(state, grads, square, stepped(state, grads, training) if allowed else None)


def validated(hope: Hope, mesh, training: Training) -> tuple[State, bool]:
    """(the state after the step, was the hoped one taken back?), when the whole norm has come back to this stage.

    With the same norm the step is bitwise the ordinary one's; of a norm that is not finite, the state as it was.
    """
    norm = math.sqrt(handed_back(hope.square, mesh.axis("pp")))
    if not math.isfinite(norm):
        return hope.before, hope.after is not None
    if clip_factor(norm, training.clip) == 1:
        return hope.after, False
    return stepped(hope.before, clipped(hope.grads, norm, training.clip), training), hope.after is not None


def stepped(state: State, grads: dict, training: Training) -> State:
    """The state after the optimizer's step with these gradients."""
    return State(*updated(state.params, grads, state.m, state.v, state.step, rate_of(state.step, training), training))


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
