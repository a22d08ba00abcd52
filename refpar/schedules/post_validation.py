"""Post-validation: the optimizer's step is taken before the gradient's norm is known, and taken back if the norm says so.

The norm is a sum over all stages, and to wait for it would bring back the bubble that zero bubble removes.  Nearly every step needs no
clipping and has no NaN.  So each stage takes the step that is right then, goes on, and looks at the norm when it comes: if the step was
wrong it goes back to the state that it kept, and takes the clipped step, or, of a gradient that is not finite, none.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 4.
"""
from __future__ import annotations

import math
from typing import Callable

from refpar.config import Training
from refpar.nn.optimizer import clip_factor, clipped, updated
from refpar.train import State, rate_of


def post_validated(state: State, grads: dict, norm_of: Callable[[], float], training: Training) -> tuple[State, bool]:
    """(the state after the step, was it taken back?).  norm_of(): waits for the global norm; it is asked when the step is taken.

    What the step gives is bitwise the ordinary one's; of a norm that is not finite, the state as it was.
    """
    def step(gradients):
        return State(*updated(state.params, gradients, state.m, state.v, state.step, rate_of(state.step, training), training))
    hoped = step(grads)
    norm = norm_of()
    if not math.isfinite(norm):
        return state, True
    wrong = clip_factor(norm, training.clip) != 1
    return (step(clipped(grads, norm, training.clip)) if wrong else hoped), wrong
