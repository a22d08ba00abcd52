"""A whole training run as one rank sees it: step after step, replicas compared, checkpoints and a log; then the held-out text.

Nothing here depends on how far a run came before it was stopped: batches, dropout and rates are functions of the step's number, so
a run that goes on from a checkpoint is bitwise the run that was never stopped.  Checkpoints are of whole parameters and know no layout:
a run may go on with another, or change it on the way, and is then equal to the straight run but for the order in which sums are added.
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
from refpar.comm.mesh import Axis, Mesh
from refpar.comm.wire import Failed
from refpar.config import Layout, Model, Training, share
from refpar.nn.build import build
from refpar.nn.gradient import loss_of, zeros_like
from refpar.nn.init import initial
from refpar.parallel import fill
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut
from refpar.parallel.reshard import Place, holders, reshard
from refpar.progress import Log
from refpar.train import State, rate_of, train_step

WHOLE = Layout()                # how parameters lie in a checkpoint: on one rank
DIGEST = 16                     # bytes


class Plan(NamedTuple):
    """What a run does, the same on every rank.  switch: after so many steps it goes on with another layout."""
    model: Model
    layout: Layout
    training: Training
    text: corpus.Corpus
    folder: Path
    save_every: int
    switch: tuple[int, Layout] | None = None

    def layout_at(self, step: int) -> Layout:
        """The layout of the step that follows `step` steps."""
        return self.switch[1] if self.switch and step >= self.switch[0] else self.layout

    def dims(self) -> dict[str, dict[str, str]]:
        """Layer -> parameter -> dims."""
        return build(self.model).dims()

    def meta(self, step: int = 0) -> dict:
        """What its checkpoints say of it."""
        about = checkpoint.describe(self.model, self.layout_at(step), self.training)
        return about | {"text": self.text.name, "bytes": self.text.train.size}


class Start(NamedTuple):
    """Where a run begins: with fresh weights, or with a checkpoint of a later step."""
    step: int = 0
    checkpoint: Path | None = None


class Ending(NamedTuple):
    """How a run ended: its last mesh and state, and one sentence if it had to stop before its last step."""
    mesh: Mesh
    state: State
    complaint: str | None = None


def fresh(plan: Plan, mesh) -> State:
    """This rank's parts of the state before the first step: it draws them alone."""
    params = initial(plan.model, build(plan.model), plan.training.seed, np.dtype(plan.training.dtype),
                     cut=lambda name, dims: cut(plan.model, dims, mesh))
    return State(params, zeros_like(params), zeros_like(params))


def stored(plan: Plan) -> Start:
    """The last checkpoint in the plan's folder; ValueError, one sentence, if it is none of this plan."""
    path = saves.latest(plan.folder)
    nothing = np.zeros((), plan.training.dtype)
    like = {layer: {p: np.broadcast_to(nothing, plan.model.shape(text)) for p, text in group.items()}
            for layer, group in plan.dims().items()}
    state, meta = checkpoint.load(path, plan.model, State(like, like, like)._asdict())
    here = plan.meta()
    for field, value in (here["training"] | {"text": here["text"], "bytes": here["bytes"]}).items():
        there = (meta["training"] | meta).get(field)
        if there != value:
            raise ValueError(f"checkpoint: {path} is of another run: {field} is {there} there and {value} here")
    return Start(state["step"], path)


def begun(plan: Plan, start: Start, mesh) -> State:
    """This rank's parts of the state to begin with.  A checkpoint is read on rank 0."""
    if start.checkpoint is None:
        return fresh(plan, mesh)
    state = State({}, {}, {}, start.step)
    if mesh.wire.rank == 0:
        state = State(**checkpoint.load(start.checkpoint)[0])
    return moved(plan, state, WHOLE, mesh.layout, mesh.wire)


def moved(plan: Plan, state: State, before: Layout, after: Layout, wire) -> State:
    """The state as another layout wants it."""
    return State(*(moved_arrays(plan, arrays, before, after, wire) for arrays in state[:3]), state.step)


def moved_arrays(plan: Plan, arrays: dict, before: Layout, after: Layout, wire) -> dict:
    """The same of parameters, or of one of their moments."""
    return reshard(arrays, plan.model, plan.dims(), Place(before), Place(after), wire, plan.training.dtype)


def fit(wire, plan: Plan, start: Start, told: Callable[[int, float, int], None]) -> Ending:
    """Train from `start` to the plan's last step; rank 0 alone writes, and tells each step: told(steps done, loss, targets)."""
    mesh = Mesh(plan.layout_at(start.step), wire)
    state = begun(plan, start, mesh)
    log = None
    if wire.rank == 0:
        with writing(plan.folder):
            log = Log(saves.prepare(plan.folder) / "log.jsonl")
    while True:
        state, complaint = steps(mesh, plan, state, told, log)
        if complaint or state.step == plan.training.steps:
            break
        after = plan.layout_at(state.step)
        state, mesh = moved(plan, state, mesh.layout, after, wire), Mesh(after, wire)
    if log:
        log.close()
    return Ending(mesh, state, complaint)


def steps(mesh, plan: Plan, state: State, told: Callable, log: Log | None) -> tuple[State, str | None]:
    """Train as long as the layout is the mesh's: the state then, and one sentence if the run must stop."""
    training, since = plan.training, time.monotonic()
    chain = fill.model(plan.model, mesh, training.seed)
    if log:
        with writing(plan.folder):
            log.write(event="begin", step=state.step, **plan.meta(state.step))
    while state.step < training.steps and plan.layout_at(state.step) == mesh.layout:
        rate = rate_of(state.step, training)
        state, report = train_step(chain, state, batches(plan, mesh, state.step), mesh, training)
        if log:
            told(state.step, report.loss, report.count)
            with writing(plan.folder):
                log.write(event="step", step=state.step, loss=report.loss, targets=report.count, norm=report.norm, rate=rate,
                          seconds=round(time.monotonic() - since, 3))
        if not math.isfinite(report.loss):
            return state, f"the loss of step {state.step} is {report.loss}"
        if state.step % plan.save_every == 0 or state.step == training.steps:
            complaint = keep(mesh, plan, state)
            if complaint:
                return state, complaint
    return state, None


def batches(plan: Plan, mesh, step: int) -> list[corpus.Batch]:
    """This rank's micro-batches of a step: dp cuts the rows, cp their columns."""
    training, dp, cp, way = plan.training, mesh.axis("dp"), mesh.axis("cp"), way_of(plan.model, mesh.layout)
    return [part_of(corpus.batch(plan.text, training, step, rows), way, cp)
            for rows in corpus.micro_batches(training.rows, dp.size, dp.index, training.micro_batches)]


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


def keep(mesh, plan: Plan, state: State) -> str | None:
    """Compare the replicas, and save the whole of them; one sentence, and nothing saved, where they differ."""
    apart = replica_apart(mesh, plan, state)
    if apart is not None:
        return f"after step {state.step} {apart}"
    whole = moved(plan, state, mesh.layout, WHOLE, mesh.wire)
    if mesh.wire.rank == 0:
        with writing(plan.folder):
            saves.save_step(plan.folder, whole._asdict(), plan.meta(state.step - 1))
    return None


def replica_apart(mesh, plan: Plan, state: State) -> str | None:
    """The first parameter or moment that two ranks hold, and not bitwise alike: a digest of each goes around."""
    names = [(kind, layer, p, text) for kind in ("params", "m", "v") for layer, group in plan.dims().items() for p, text in group.items()]
    mine = b"".join(digest(getattr(state, kind)[layer].get(p)) for kind, layer, p, _ in names)
    world = Axis.world(mesh.wire)
    found = all_gather(np.frombuffer(mine, np.uint8).reshape(1, len(names), DIGEST), world, 0, [1] * world.size)
    for place, (kind, layer, p, text) in enumerate(names):
        for first, *others in holders(plan.model, (layer, p), text, Place(mesh.layout)).values():
            for rank in others:
                if (found[rank, place] != found[first, place]).any():
                    return f"{kind}/{layer}.{p} of rank {rank} is not bitwise that of rank {first}, which holds the same part"
    return None


def digest(array: np.ndarray | None) -> bytes:
    """A fingerprint of an array's bytes; zeros for what a rank does not hold."""
    if array is None:
        return bytes(DIGEST)
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=DIGEST).digest()


def held_out_loss(mesh, plan: Plan, params: dict) -> float:
    """Mean cross-entropy over the held-out text, nats per byte: each dp rank takes its share of windows, each cp rank its share of
    their tokens; (sum, count) add up."""
    model = replace(plan.model, dropout=0.0, smoothing=0.0, z_loss=0.0)
    chain, way = fill.model(model, mesh), way_of(model, mesh.layout)
    dp, cp, sequence = mesh.axis("dp"), mesh.axis("cp"), plan.training.sequence
    mine = share(corpus.held_out_rows(plan.text, sequence), dp.size, dp.index)
    total = np.zeros(2)                                                                         # sum, count
    for start in range(mine.start, mine.stop, plan.training.rows):
        rows = slice(start, min(start + plan.training.rows, mine.stop))
        total += loss_of(chain, params, part_of(corpus.held_out(plan.text, sequence, rows), way, cp))
    total = all_reduce(total, mesh.axis("dp", "cp"))
    return float(total[0] / total[1])
