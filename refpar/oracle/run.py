"""Run a situation twice: sharded, by the code that trains, and whole, by a single process that knows of no rank.

The whole run is the meaning, so it is written apart, in the plainest way: one batch of all rows, one pass, the gradients as they
come.  Both tell what they did as a `Run`.
"""
from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.mesh import Mesh
from refpar.corpus import micro_batches
from refpar.nn.build import build, plain
from refpar.nn.gradient import loss_and_gradients, zeros_like
from refpar.nn.init import initial
from refpar.nn.optimizer import clipped, updated
from refpar.oracle.equal import leaves
from refpar.oracle.freeze import frozen, frozen_seams
from refpar.oracle.situation import Situation
from refpar.train import State, rate_of, train_step


class Step(NamedTuple):
    """What one step gave: raw gradients (summed over the whole step, before clipping) and the state after it."""
    loss: float                 # summed over the targets
    count: int
    norm: float
    input_gradient: np.ndarray  # of the first layer's input, [rows, S, D]
    gradients: dict
    state: State
    addends: dict = {}          # of the whole run: layer by layer, the largest magnitude in any row's own gradient


class Run(NamedTuple):
    """What one rank tells of a run.  Replicas beyond the first tell digests in place of arrays they must share bitwise."""
    steps: list[Step]
    digests: list[dict[str, str]]
    peak: dict[str, int]                                        # elements held at most, by kind of store
    sent: dict[tuple[str | None, str | None], tuple[int, int]]  # (axis, operation) -> messages, bytes


class Points(watch.Observer):
    """Keeps what passes the points to compare: the gradient of the first layer's input, micro-batch by micro-batch, and the
    gradients of the step."""

    def __init__(self, chain):
        self.input, self.rows, self.gradients = f"d {chain.layers[1][0]}", [], {}

    def value(self, name, array):
        if name == self.input:
            self.rows.append(array)
        if name == "gradients":
            self.gradients = array

    def input_gradient(self) -> np.ndarray:
        """All rows since the last call."""
        rows, self.rows = np.concatenate(self.rows), []
        return rows


def fresh(situation: Situation):
    """The model's chain, and the state before the first step: rough weights, so that no fault hides behind a 1 or a 0; frozen,
    so that who writes into what it was lent fails."""
    training = situation.training
    chain = frozen(build(situation.model, training.seed, frozen_seams(plain(situation.model, training.seed))))
    params = initial(situation.model, chain, training.seed, np.dtype(training.dtype), rough=True)
    return chain, State(params, zeros_like(params), zeros_like(params))


def whole_step(situation: Situation, chain, state: State) -> Step:
    """One step in a single process, from `state`: every row in one batch."""
    batch = situation.batch(state.step)
    with watch.watching(Points(chain)) as points:
        loss, grads = loss_and_gradients(chain, state.params, batch, batch.count)
    norm = math.sqrt(sum(float(np.sum(np.square(grad, dtype=np.float64))) for _, grad in leaves(grads)))
    training = situation.training
    after = State(*updated(state.params, clipped(grads, norm, training.clip), state.m, state.v, state.step,
                           rate_of(state.step, training), training))
    return Step(loss, batch.count, norm, points.input_gradient(), grads, after, largest_addends(chain, state.params, batch))


def largest_addends(chain, params: dict, batch) -> dict[str, float]:
    """Layer by layer, the largest magnitude in the gradients of any single row.

    It is the scale of the bound (`equal`): rows are the addends that ranks and micro-batches add in another order, and what
    cancels inside a row (the key's gradient where a token sees itself alone is 0, and rounding makes it 1e-17) is of the
    magnitude of its layer's other gradients.
    """
    largest = dict.fromkeys(params, 0.0)
    for row in range(len(batch.tokens)):
        _, grads = loss_and_gradients(chain, params, batch.cut(slice(row, row + 1)), batch.count)
        for name, grad in leaves(grads):
            layer = name.rpartition(".")[0]
            largest[layer] = max(largest[layer], float(np.max(np.abs(grad))))
    return largest


def run_sharded(wire, situation: Situation) -> Run:
    """The program of one rank: the steps of the situation by `train_step`, watched."""
    mesh = Mesh(situation.layout, wire)
    chain, state = fresh(situation)
    training, dp = situation.training, mesh.axis("dp")
    steps, digests = [], []
    with watch.watching(watch.Ledger()) as ledger, watch.watching(Points(chain)) as points:
        for number in range(training.steps):
            rows = micro_batches(situation.rows(number), dp.size, dp.index, training.micro_batches)
            state, report = train_step(chain, state, [situation.batch(number, part) for part in rows], mesh, training)
            step = Step(report.loss * max(report.count, 1), report.count, report.norm, points.input_gradient(),
                        points.gradients, state)
            digests.append({name: digest(array) for name, array in leaves({"gradient": step.gradients, **state._asdict()})})
            steps.append(step if dp.index == 0 else step._replace(gradients={}, state=None))
    sent = {key[1:]: (ledger.messages[key], ledger.bytes[key]) for key in ledger.messages if key[0] == "send"}
    return Run(steps, digests, dict(ledger.peak), sent)


def digest(array) -> str:
    """A fingerprint of an array's bytes: equal for bitwise equal arrays only."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=12).hexdigest()
