"""`refpar train`: train a model over the ranks of a mesh, and judge it on text that was held out.

A *preset run* (a preset's model, its own training, the default text) is an experiment with a verdict.  The model must predict the
held-out text better than a trigram model does, and better than its *control*: the same model, trained alike, with its mixer cut
out, so that no token sees another but through a conv.  Then it has learned from context, and not only how often bytes follow bytes.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

from refpar import ngram, reading
from refpar.cli import check_ranks, layout_of, training_of
from refpar.commands.memory import keep_pages
from refpar.config import PRESETS, TRAININGS, Layout, Model, Training
from refpar.fit import WHOLE, Plan, Start, fit, held_out_loss, left_in, moved_arrays, stored
from refpar.named import describe_model, parse_model
from refpar.nn.build import build
from refpar.progress import Progress
from refpar.sample import sample
from refpar.trace import Traced, writable

PROMPT = 32             # bytes of the held-out text that the sample goes on from
TEMPERATURE = 0.8


class Job(NamedTuple):
    """Runs to do, each with where it begins: the model's, and the control's if there is one."""
    plan: Plan
    start: Start
    control: tuple[Plan, Start] | None
    judged: bool
    sample: int
    json: bool
    trace: Path | None


class Outcome(NamedTuple):
    """What a rank tells at the end: losses on the held-out text by name, or why there are none."""
    losses: dict[str, float]
    complaint: str | None = None


def prepare(world, args) -> Job:
    """Refuse what cannot be run; load the text, and look into the checkpoint to go on from."""
    text = args.model or "llama"
    model, layout = parse_model(text), trained_on(world, args, args.mesh or f"dp={world.size or 1}")
    training = training_of(args, TRAININGS.get(text.split(",")[0], Training()), layout.dp)
    if model.vocab < ngram.BYTES:
        raise ValueError(f"model: vocab={model.vocab} must be at least {ngram.BYTES}: tokens are bytes")
    model.require_positions(training.sequence, f"--sequence {training.sequence}")
    sampled = min(300, sample_room(model)) if args.sample is None else args.sample
    model.require_positions(sampled and PROMPT + sampled - 1, f"--sample {sampled} after a prompt of {PROMPT} bytes")
    judged = args.text is None and is_preset(model, training)
    plan = Plan(model, layout, training, reading.load(args.text, training.sequence), Path(), args.save_every or 100,
                switch_of(world, args, layout, training))
    plan = plan._replace(folder=args.out or default_folder(plan))
    for used in (layout, *([plan.switch[1]] if plan.switch else [])):
        plan.place(used)                                        # refuses a schedule that cannot be
    check_folder(plan.folder, args.resume)
    control = None
    if judged and not args.no_control:
        cut = plan._replace(model=replace(model, cut=True), folder=plan.folder / "control")
        control = cut, stored(cut) if any(cut.folder.glob("step-*.npz")) else Start()
    start = stored(plan) if args.resume else Start()
    return Job(plan, start, control, judged, sampled, args.json, writable(args.trace))


def sample_room(model: Model) -> int:
    """How many bytes the model can write after the prompt: with learned positions no more than it has."""
    return max(0, model.longest - PROMPT + 1) if model.positions == "learned" else sys.maxsize


def trained_on(world, args, mesh: str) -> Layout:
    """The layout of a mesh, refused where models cannot be trained on it here."""
    layout = layout_of(args, mesh)
    if world.size is not None and world.size != layout.ranks:
        raise ValueError(f"mesh {layout} needs {layout.ranks} ranks, and mpiexec started {world.size} processes")
    check_ranks(world, layout)
    return layout


def switch_of(world, args, layout: Layout, training: Training) -> tuple[int, Layout] | None:
    """The step and the layout of --switch."""
    if args.switch is None:
        return None
    step, mesh = args.switch
    after = trained_on(world, args, mesh)
    if step >= training.steps:
        raise ValueError(f"--switch {step}:{mesh} must come before the last of {training.steps} steps")
    if after.ranks != layout.ranks:
        raise ValueError(f"--switch {step}:{mesh} has {after.ranks} ranks, and mesh {layout} has {layout.ranks}")
    return step, after


def is_preset(model: Model, training: Training) -> bool:
    """Is this what a preset trains?  The seed, the dtype and the cut into micro-batches do not matter."""
    return any(model == PRESETS[name] and training == replace(preset, seed=training.seed, dtype=training.dtype,
                                                              micro_batches=training.micro_batches)
               for name, preset in TRAININGS.items())


def default_folder(plan: Plan) -> Path:
    """runs/NAME-DIGEST: the same command always has the same folder."""
    digest = hashlib.blake2b(json.dumps([plan.meta(), str(plan.switch)], sort_keys=True).encode(), digest_size=4).hexdigest()
    return Path("runs") / f"{describe_model(plan.model).split(',')[0]}-{digest}"


def check_folder(folder: Path, resume: bool):
    """Refuse a folder with another run's checkpoints, or one that could not be made.  What a failed start left is in nobody's way."""
    if not resume and any(folder.glob("step-*.npz")):
        raise ValueError(f"the folder {folder} has checkpoints already: go on from the last by --resume, or name another by --out")
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        os.rmdir(mkdtemp(prefix=".", dir=above))
    except OSError:
        raise ValueError(f"the folder {folder} cannot be made, for {above} is no folder that can be written to") from None


def run(world, job: Job) -> int:
    """Train, judge, and say so in the last line."""
    keep_pages()
    ranks = job.plan.layout.ranks
    if world.size is None and ranks > 1:
        sys.stderr.write(f"{ranks} ranks as threads of one process share one core; as processes:  "
                         f"mpiexec -n {ranks} python -m mpi4py -m refpar {shlex.join(sys.argv[1:])}\n\n")
    outcome = world.run(Traced(program, job.trace) if job.trace else program, ranks, job)[0]
    passed, sentence = verdict(job, outcome)
    if world.main:
        print(json.dumps({**outcome._asdict(), "passed": passed, "folder": str(job.plan.folder)}) if job.json else sentence)
    return 0 if passed else 1


def program(wire, job: Job) -> Outcome:
    """One rank's part: train, measure, write a sample; then the control."""
    out = sys.stderr if job.json else sys.stdout

    def say(text: str):
        if wire.rank == 0:
            print(text, file=out, flush=True)
    say(heading(job))
    losses = ngram.baselines(job.plan.text)
    say(f"held-out loss, nats per byte: {ngram.described(losses)}\n")
    for name, plan, start in runs(job):
        if name == "control":
            say(f"\ncontrol: the same model with its mixer cut out, {parameters(plan):,} parameters")
        progress = Progress(plan.training.steps, start.step, out)
        mesh, state, complaint = fit(wire, plan, start, progress.update)
        progress.close()
        if complaint:
            return Outcome({}, complaint)
        losses[name] = held_out_loss(mesh, plan, state.params)
        if name == "model" and job.sample > 0:
            whole = moved_arrays(plan, state.params, mesh.layout, WHOLE, wire)
            if wire.rank == 0:
                say(written(plan, whole, job.sample))
    say(table(losses))
    return Outcome(losses)


def runs(job: Job):
    """(name, plan, start) of each run to do."""
    yield "model", job.plan, job.start
    if job.control:
        yield "control", *job.control


def heading(job: Job) -> str:
    """What is about to be trained, on what."""
    plan, training = job.plan, job.plan.training
    text, rows = plan.text, f"{training.rows} rows of {training.sequence} tokens"
    switch = f", after step {plan.switch[0]} {plan.switch[1]}" if plan.switch else ""
    return (f"model   {describe_model(plan.model)}, {parameters(plan):,} parameters\n"
            f"mesh    {plan.layout}{switch}\n"
            f"text    {text.name}: {text.train.size:,} bytes to train on, {text.held_out.size:,} held out\n"
            f"steps   {training.steps} of {rows}, from step {job.start.step}\n"
            f"folder  {plan.folder}")


def parameters(plan: Plan) -> int:
    """How many numbers the model has learned."""
    return sum(math.prod(plan.model.shape(text)) for group in plan.dims().values() for text in group.values())


def written(plan: Plan, params: dict, length: int) -> str:
    """A sample: how the model goes on from the beginning of the held-out text."""
    prompt = bytes(plan.text.held_out.tokens[:PROMPT].tolist())
    text = sample(build(replace(plan.model, dropout=0.0)), params, prompt, length, plan.training.seed, TEMPERATURE)
    lines = (prompt + text).decode(errors="replace").splitlines()
    head = f"sample, temperature {TEMPERATURE}, after {len(prompt)} bytes of the held-out text"
    return "\n".join(["", head, *(f"  | {line}" for line in lines)])


def table(losses: dict[str, float]) -> str:
    """Every held-out loss, a line each."""
    return "\n".join(["", "held-out loss, nats per byte"] + [f"  {name:<10}{loss:8.4f}" for name, loss in losses.items()] + [""])


def verdict(job: Job, outcome: Outcome) -> tuple[bool, str]:
    """Did the run do what it must, and the sentence that says so."""
    if outcome.complaint:
        return False, f"FAILED: {outcome.complaint}; {left_in(job.plan.folder)}"
    losses = outcome.losses
    below = losses["trigram"] - losses["model"]
    margin = losses["control"] - losses["model"] if "control" in losses else None
    baselines = ", ".join(f"{name} {losses[name]:.4f}" for name in ngram.NAMES)
    sentence = (f"held-out loss {losses['model']:.4f} nats per byte against {baselines}: "
                f"{abs(below):.4f} {'below' if below > 0 else 'above'} the trigram's")
    if margin is not None:
        sentence += f"; with its mixer cut out {losses['control']:.4f}, {'worse' if margin > 0 else 'better'} by {abs(margin):.4f}"
    if not job.judged:
        return True, f"{sentence}; not a preset's own run, so not judged"
    passed = below > 0 and (margin is None or margin > 0)
    return passed, f"{'PASSED' if passed else 'FAILED'}: {sentence}"
