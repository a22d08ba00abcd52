"""A whole training run as one rank sees it: step after step, replicas compared, checkpoints and a log; then the held-out text.

Nothing here depends on how far a run came before it was stopped: batches, dropout and rates are functions of the step's number, so
a run that goes on from a checkpoint is bitwise the run that was never stopped.
"""
from __future__ import annotations

import hashlib
import math
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np

from refpar import checkpoint, corpus, saves
from refpar.comm.collectives import all_gather, all_reduce
from refpar.comm.wire import Failed
from refpar.config import Layout, Model, Training, share
from refpar.nn.build import build
from refpar.nn.gradient import loss_of, zeros_like
from refpar.nn.init import initial
from refpar.progress import Log
from refpar.train import State, rate_of, train_step


class Plan(NamedTuple):
    """What a run does, the same on every rank."""
    model: Model
    layout: Layout
    training: Training
    text: corpus.Corpus
    folder: Path
    save_every: int

    def meta(self) -> dict:
        """What its checkpoints say of it."""
        return checkpoint.describe(self.model, self.layout, self.training) | {"text": self.text.name, "bytes": self.text.train.size}


class Ending(NamedTuple):
    """How a run ended: its last state, and one sentence if it had to stop before its last step."""
    state: State
    complaint: str | None = None


def fresh(plan: Plan) -> State:
    """The state before the first step."""
    chain = build(plan.model, seed=plan.training.seed)
    params = initial(plan.model, chain, plan.training.seed, np.dtype(plan.training.dtype))
    return State(params, zeros_like(params), zeros_like(params))


def stored(plan: Plan) -> State:
    """The state of the last checkpoint in the plan's folder; ValueError, one sentence, if it is none of this plan."""
    path = saves.latest(plan.folder)
    state, meta = checkpoint.load(path, plan.model, fresh(plan)._asdict())
    here = plan.meta()
    for field, value in (here["training"] | {"text": here["text"], "bytes": here["bytes"]}).items():
        there = (meta["training"] | meta).get(field)
        if there != value:
            raise ValueError(f"checkpoint: {path} is of another run: {field} is {there} there and {value} here")
    return State(**state)


def fit(mesh, plan: Plan, state: State, told: Callable[[int, float, int], None]) -> Ending:
    """Train from `state` to the plan's last step; rank 0 alone writes, and tells each step: told(steps done, loss, targets)."""
    dp, training, begun = mesh.axis("dp"), plan.training, time.monotonic()
    chain = build(plan.model, seed=training.seed)
    parts = corpus.micro_batches(training.rows, dp.size, dp.index, training.micro_batches)
    log = None
    if mesh.wire.rank == 0:
        with writing(plan.folder):
            log = Log(saves.prepare(plan.folder) / "log.jsonl")
            log.write(event="begin", step=state.step, **plan.meta())
    while state.step < training.steps:
        batches = [corpus.batch(plan.text, training, state.step, part) for part in parts]
        rate = rate_of(state.step, training)
        state, report = train_step(chain, state, batches, mesh, training)
        if log:
            told(state.step, report.loss, report.count)
            with writing(plan.folder):
                log.write(event="step", step=state.step, loss=report.loss, targets=report.count, norm=report.norm, rate=rate,
                          seconds=round(time.monotonic() - begun, 3))
        complaint = None if math.isfinite(report.loss) else f"the loss of step {state.step} is {report.loss}"
        if complaint is None and _due(state.step, plan):
            complaint = _keep(mesh, plan, state)
        if complaint:
            return Ending(state, complaint)
    if log:
        log.close()
    return Ending(state)


@contextmanager
def writing(folder: Path):
    """Inside the block OSError, such as that of a full disk, becomes Failed, which ends every rank in one sentence."""
    try:
        yield
    except OSError as error:
        raise Failed(f"writing into {folder}: {error.strerror or error}; {left_in(folder)}") from error


def left_in(folder: Path) -> str:
    """What a run that stops leaves to go on from."""
    return f"the last good checkpoint is in {folder}" if any(folder.glob("step-*.npz")) else f"{folder} holds no checkpoint"


def _due(step: int, plan: Plan) -> bool:
    return step % plan.save_every == 0 or step == plan.training.steps


def _keep(mesh, plan: Plan, state: State) -> str | None:
    """Compare the replicas, and save one of them; one sentence, and nothing saved, where they differ."""
    apart = replica_apart(state, mesh)
    if apart is not None:
        return f"after step {state.step} the weights or moments of dp rank {apart} are not bitwise those of dp rank 0"
    if mesh.wire.rank == 0:
        with writing(plan.folder):
            saves.save_step(plan.folder, state._asdict(), plan.meta())
    return None


def replica_apart(state: State, mesh) -> int | None:
    """The first dp rank whose state is not bitwise that of dp rank 0: 16 bytes of digest go around."""
    digest = hashlib.blake2b(digest_size=16)
    for array in checkpoint.flatten(state._asdict()).values():
        digest.update(np.ascontiguousarray(array).tobytes())
    dp = mesh.axis("dp")
    digests = all_gather(np.frombuffer(digest.digest(), np.uint8)[None], dp, 0, [1] * dp.size)      # [dp, 16]
    apart = np.flatnonzero((digests != digests[0]).any(axis=1))
    return int(apart[0]) if apart.size else None


def held_out_loss(mesh, plan: Plan, params: dict) -> float:
    """Mean cross-entropy over the held-out text, nats per byte: each dp rank takes its share of windows; (sum, count) add up."""
    chain = build(replace(plan.model, dropout=0.0, smoothing=0.0, z_loss=0.0))
    dp, sequence = mesh.axis("dp"), plan.training.sequence
    mine = share(corpus.held_out_rows(plan.text, sequence), dp.size, dp.index)
    total = np.zeros(2)                                                                         # sum, count
    for start in range(mine.start, mine.stop, plan.training.rows):
        rows = slice(start, min(start + plan.training.rows, mine.stop))
        total += loss_of(chain, params, corpus.held_out(plan.text, sequence, rows))
    total = all_reduce(total, dp)
    return float(total[0] / total[1])
