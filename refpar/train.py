"""Training: one step as one sentence, and the loop around it."""
from __future__ import annotations

import math
from typing import NamedTuple

from refpar import watch
from refpar.config import Training
from refpar.nn.chain import Chain
from refpar.nn.optimizer import clipped, updated
from refpar.parallel.data import accumulate, count_targets, reduce_gradients, sum_loss
from refpar.parallel.placement import squared_norm


class State(NamedTuple):
    """What training changes: parameters, the optimizer's two moments, and the number of steps done."""
    params: dict
    m: dict
    v: dict
    step: int = 0


class Report(NamedTuple):
    """What one step tells: mean loss over its targets, their count, and the gradient's norm before clipping."""
    loss: float
    count: int
    norm: float


def rate_of(step: int, training: Training) -> float:
    """The learning rate of step 0, 1, ...: a linear rise over `warmup` steps, then a cosine down to a tenth."""
    if step < training.warmup:
        return training.rate * (step + 1) / training.warmup
    done = (step - training.warmup) / max(1, training.steps - training.warmup)
    return training.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))


def train_step(chain: Chain, state: State, batches: list, mesh, training: Training, work=accumulate) -> tuple[State, Report]:
    """Count the step's targets, go down and up the chain for each micro-batch, sum over the ranks, clip, and update.

    `work` does the second: a pipeline's is made by `parallel.pipeline.pipelined`, and `chain` is then this rank's part.
    """
    watch.held("weight", state.params)
    count = count_targets(batches, mesh)
    loss, grads = work(chain, state.params, batches, count)
    loss, grads = sum_loss(loss, mesh), reduce_gradients(grads, chain, mesh)
    watch.value("gradients", grads)
    norm = math.sqrt(squared_norm(grads, chain, mesh))
    state = State(*updated(state.params, clipped(grads, norm, training.clip), state.m, state.v, state.step,
                           rate_of(state.step, training), training))
    watch.held("optimizer", [state.m, state.v])
    return state, Report(loss / max(count, 1), count, norm)
