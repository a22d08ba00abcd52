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
from refpar.corpus import Batch, micro_batches
from refpar.nn.build import build, plain
from refpar.nn.gradient import loss_and_gradients, zeros_like
from refpar.nn.init import initial
from refpar.nn.optimizer import clipped, updated
from refpar.oracle.equal import leaves
from refpar.oracle.freeze import frozen, frozen_seams
from refpar.oracle.situation import Situation
from refpar.parallel import fill
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut
from refpar.schedules.model import part_of_model
from refpar.train import State, rate_of, train_step


class Step(NamedTuple):
    """What one step gave: raw gradients (summed over the whole step, before clipping) and the state after it.

    The whole's, or a rank's: its part of each parameter, and of the tokens of the step those that `index` [rows, columns] names.
    """
    loss: float                 # summed over the targets
    count: int
    norm: float
    input_gradient: np.ndarray  # of the first layer's input, [rows, columns, D]
    index: np.ndarray           # row*S + column
    gradients: dict
    state: State


class Whole(NamedTuple):
    """One step of the single process, and what it needs to be compared with."""
    step: Step
    addends: dict[str, float]   # layer by layer, the largest magnitude in any row's own gradient
    ledger: watch.Ledger        # of its one pass down and up


class Run(NamedTuple):
    """What one rank tells of a run.  Replicas beyond the first tell digests in place of the arrays that they share bitwise."""
    steps: list[Step]
    digests: list[dict[tuple[str, str, str], str]]              # of each step: (store, layer, parameter) -> digest
    peak: dict[str, int]                                        # elements held at most, by kind of store
    sent: dict[tuple[str | None, str | None], tuple[int, int]]  # (axis, operation) -> messages, bytes
    flops: dict[str, int]                                       # by op


class Points(watch.Observer):
    """Keeps what passes the points to compare: the gradient of the first layer's input, with the index of its tokens, and the
    gradients of the step.  `here(batch)`: those tokens of a batch that the stream has here."""

    def __init__(self, chain, here=lambda batch: batch):
        self.input, self.here, self.width, self.gradients = f"d {chain.layers[1][0]}", here, chain.model.width, {}
        self.rows, self.index, self.batch = [], [], None

    def value(self, name, array):
        if name == "batch":
            self.batch = array
        if name == self.input:
            self.rows.append(array.reshape(array.size // self.width, self.width))   # [T, D]
            self.index.append(self.here(self.batch).index.ravel())                  # [T]
        if name == "gradients":
            self.gradients = array

    def input_gradient(self, dtype):
        """(gradient, index) of all tokens since the last call; none where the first layer stands on another stage."""
        rows = np.concatenate([np.zeros((0, self.width), dtype), *self.rows])
        index = np.concatenate([np.zeros(0, np.int64), *self.index])
        self.rows, self.index = [], []
        return rows, index


# ------------------------------------------------------------------------------------------------------------ the single process

def fresh(situation: Situation):
    """The model's chain, and the state before the first step: rough weights, so that no fault hides behind a 1 or a 0; frozen,
    so that who writes into what it was lent fails."""
    seed = situation.training.seed
    chain = frozen(build(situation.model, seed, frozen_seams(plain(situation.model, seed))))
    return chain, first_state(situation, chain)


def first_state(situation: Situation, chain, cut=None) -> State:
    """Of the whole model, or of a rank's part (`initial` says what `cut` is)."""
    training = situation.training
    params = initial(situation.model, chain, training.seed, np.dtype(training.dtype), cut, rough=True)
    return State(params, zeros_like(params), zeros_like(params))


def whole_step(situation: Situation, chain, state: State) -> Whole:
    """One step in a single process, from `state`: every row in one batch."""
    batch = situation.batch(state.step)
    with watch.watching(Points(chain)) as points, watch.watching(watch.Ledger()) as ledger:
        loss, grads = loss_and_gradients(chain, state.params, batch, batch.count)
    norm = math.sqrt(sum(float(np.sum(np.square(grad, dtype=np.float64))) for _, grad in leaves(grads)))
    training = situation.training
    after = State(*updated(state.params, clipped(grads, norm, training.clip), state.m, state.v, state.step,
                           rate_of(state.step, training), training))
    step = Step(loss, batch.count, norm, *points.input_gradient(training.dtype), grads, after)
    return Whole(step, largest_addends(chain, state.params, batch), ledger)


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


# --------------------------------------------------------------------------------------------------------------- a rank of a mesh

def batches_of(situation: Situation, mesh, number: int) -> list[Batch]:
    """A rank's micro-batches of one step: its dp share of the rows, and of each its cp part of the columns."""
    dp, training = mesh.axis("dp"), situation.training
    rows = micro_batches(situation.rows(number), dp.size, dp.index, training.micro_batches)
    way = way_of(situation.model, situation.layout)
    return [part_of(situation.batch(number, part), way, mesh.axis("cp")) for part in rows]


def run_sharded(wire, situation: Situation) -> Run:
    """The program of one rank: the steps of the situation by `train_step`, watched."""
    mesh, model, training = Mesh(situation.layout, wire), situation.model, situation.training
    whole = frozen(fill.model(model, mesh, training.seed, around=frozen_seams))
    chain, work = part_of_model(model, mesh, training, whole)
    state = first_state(situation, chain, cut=lambda name, dims: cut(model, dims, mesh))
    first = mesh.axis("dp", "cp").index == 0
    steps, digests = [], []
    with watch.watching(watch.Ledger()) as ledger, watch.watching(Points(whole, fill.tokens_here(mesh))) as points:
        for number in range(training.steps):
            batches = batches_of(situation, mesh, number)
            state, report = train_step(chain, state, batches, mesh, training, work)
            step = Step(report.loss * max(report.count, 1), report.count, report.norm, *points.input_gradient(training.dtype),
                        points.gradients, state)
            digests.append(digests_of(step))
            steps.append(step if first else step._replace(gradients={}, state=None))
    sent = {key[1:]: (ledger.messages[key], ledger.bytes[key]) for key in ledger.messages if key[0] == "send"}
    return Run(steps, digests, dict(ledger.peak), sent, dict(ledger.flops))


def digests_of(step: Step) -> dict[tuple[str, str, str], str]:
    """(store, layer, parameter) -> digest, of all that replicas must share."""
    stores = {"gradients": step.gradients, "params": step.state.params, "m": step.state.m, "v": step.state.v}
    return {(store, layer, name): digest(array) for store, layers in stores.items() for layer, group in layers.items()
            for name, array in group.items()}


def digest(array) -> str:
    """A fingerprint of an array's bytes: equal for bitwise equal arrays only."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=12).hexdigest()
