"""`refpar verify`: the proof as a table, model by model and mesh by mesh.  Exit status 0 where all is equal, 1 where not."""
from __future__ import annotations

import json
import textwrap
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from refpar.cli import attribute, check_ranks, layout_of
from refpar.config import FAMILIES, FILLINGS, PRESETS, SCHEDULES, Layout
from refpar.named import describe_model, parse_model
from refpar.oracle.books import Books
from refpar.oracle.judge import Judgement, weigh
from refpar.oracle.run import run_sharded
from refpar.oracle.situation import OPTIONS, PROOF, Situation
from refpar.schedules.model import schedule_of
from refpar.trace import Traced, writable

# Where none is named: each axis alone, and together; even, uneven, and more ranks than heads; every way over cp, in turn.
MESHES = (Layout(), Layout(dp=3), Layout(tp=2), Layout(tp=3, sp=True, tp_ring=True), Layout(dp=2, tp=4, sp=True), Layout(tp=8))
OVER_CP = {
    "llama": (Layout(cp=3, cp_attention="zigzag"), Layout(cp=2, tp=2, sp=True, cp_attention="ulysses"), Layout(dp=2, cp=2, tp=2)),
    "gpt2": (Layout(cp=3, cp_attention="gather"), Layout(cp=4, tp=2, cp_attention="ulysses+ring")),
    "mamba1": (Layout(cp=3), Layout(cp=2, tp=2, sp=True, cp_mamba="heads")),
    "mamba2": (Layout(cp=3, cp_mamba="chain"), Layout(cp=4, cp_mamba="scan"), Layout(cp=2, tp=2, cp_mamba="heads")),
    "hybrid": (Layout(cp=3, cp_attention="striped"), Layout(dp=2, cp=2, tp=2, sp=True, cp_attention="zigzag", cp_mamba="heads")),
}
IN_PIPELINES = {
    "llama": (Layout(pp=4, schedule="zb-h1"), Layout(dp=2, pp=2, tp=2, schedule="interleaved")),
    "gpt2": (Layout(pp=2, tp=2, sp=True, schedule="zb-v"), Layout(pp=2, cp=2, cp_attention="zigzag", schedule="sliced")),
    "mamba1": (Layout(pp=3, recompute="full"),),
    "mamba2": (Layout(pp=2, cp=2, cp_mamba="chain", schedule="dualpipe"),),
    "hybrid": (Layout(pp=2, cp=2, tp=2, sp=True, cp_attention="zigzag", schedule="zb-h2"),
               Layout(dp=2, pp=2, cp=2, tp=2, sp=True)),
}
MICROS = 4                      # micro-batches of a pipeline, where the command names no number
KINDS = ("loss", "input", "gradient", "norm", "weights", "optimizer")
INDENT = "    "
MESH = 28                       # columns of its name, at least
HEADS = ("loss", "dinput", "grads", "norm", "weights", "optim")


class Job(NamedTuple):
    """What to verify: situations to run, what is left out and why, and, perhaps, a fault to plant."""
    situations: list[Situation]
    left_out: list[str]
    fault: str | None
    list_faults: bool
    json: bool
    trace: Path | None


def prepare(world, args) -> Job:
    """Refuse what cannot be run, in one sentence; else name the situations."""
    from refpar.oracle.faults import fault_named
    if args.fault:
        shows = fault_named(args.fault).shows
        ranks = getattr(getattr(shows, "layout", shows), "ranks", 1)
        if world.size is not None and ranks > world.size:
            raise ValueError(f"--fault {args.fault} shows on {ranks} ranks, and mpiexec started {world.size}")
    family = "uneven" if args.uneven else "tiny"
    walked = {name: PRESETS[f"{name}-{family}"] for name in FAMILIES}
    models = [parse_model(args.model)] if args.model else list(walked.values())
    layouts, left_out = layouts_of(args)
    more = {} if args.mesh else {walked[name]: [*OVER_CP[name], *IN_PIPELINES[name]] for name in FAMILIES}
    for flag in (*FILLINGS, "each-schedule"):
        if getattr(args, attribute(flag)) and not args.mesh:
            raise ValueError(f"--{flag} is of a mesh: name it by --mesh")
    if args.trace and (len(models) > 1 or len(layouts) > 1):
        raise ValueError("--trace is of one run: name its --model and its --mesh")
    walk = [(model, layout) for model in models for layout in layouts + more.get(model, [])]
    fit = [one for one in walk if world.size is None or one[1].ranks <= world.size]
    if not fit:
        raise ValueError(f"mesh {layouts[0]} needs {layouts[0].ranks} ranks, and {world.size} were started")
    for layout in {layout for _, layout in fit}:
        check_ranks(world, layout)
    if len(fit) < len(walk):
        left_out += [f"for want of ranks: {', '.join(dict.fromkeys(named(one[1]) for one in walk if one not in fit))}"]
    situations = [situation_of(args, model, layout) for model, layout in fit]
    if args.micro_batches is None and (args.each_schedule or not args.mesh):
        situations = [in_flight(situation) for situation in situations]
    for situation in situations:
        tokens = situation.training.rows * situation.training.sequence
        if max(situation.documents, default=0) > tokens:
            raise ValueError(f"--documents {max(situation.documents)} is longer than a step, which has {tokens} tokens")
        if situation.last_rows > situation.training.rows:
            raise ValueError(f"--last-rows {situation.last_rows} must be at most the {situation.training.rows} rows of a step")
        situation.model.require_positions(int(situation.batch(0).position.max()) + 1, "the longest document")
    return Job(situations, left_out, args.fault, args.list_faults, args.json, writable(args.trace))


def layouts_of(args) -> tuple[list[Layout], list[str]]:
    """Those that the command line names, with each schedule in turn where it asks for them; and the schedules left out, and why."""
    if not args.mesh:
        return list(MESHES), []
    layout = layout_of(args, args.mesh)
    if not args.each_schedule:
        return [layout], []
    if layout.pp == 1 or args.schedule or args.virtual_stages or args.slices:
        raise ValueError("--each-schedule is of a --mesh with pp of at least 2, and takes no --schedule, --virtual-stages or --slices")
    layouts, left_out = [], []
    for name in SCHEDULES:
        try:
            each = replace(layout, schedule=name)
            schedule_of(each, MICROS)
            layouts.append(each)
        except ValueError as error:
            left_out.append(str(error))
    return layouts, left_out


def in_flight(situation: Situation) -> Situation:
    """A pipeline of the list gets several micro-batches, where the command names no number."""
    several = replace(situation.training, micro_batches=MICROS)
    return replace(situation, training=several) if situation.layout.pp > 1 else situation


def situation_of(args, model, layout) -> Situation:
    """The situation that the command line describes; what it leaves open is as in PROOF."""
    named = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    return Situation(model, layout, replace(PROOF, **named), args.last_rows or 0, args.documents or (), args.ignored or (0.0,))


def run(world, job: Job) -> int:
    """Print the table, or the fault's end."""
    if job.list_faults:
        return list_faults(world)
    if job.fault:
        return run_fault(world, job.fault)
    say = partial(print, flush=True) if world.main and not job.json else _silent
    width = max([MESH, *(len(named(situation.layout)) + 1 for situation in job.situations)])
    say(heading(world, width))
    failed = []
    for situation in job.situations:
        program = Traced(run_sharded, job.trace) if job.trace else run_sharded
        runs = world.run(program, situation.layout.ranks, situation)
        if world.main:
            judgement = weigh(situation, runs)
            say(line(situation, judgement, width))
            if job.json:
                print(json.dumps(as_json(situation, judgement)))
            if judgement.complaint:
                failed.append(f"{judgement.complaint}\n  again: {situation.command()}")
    say(ending(job, failed, world))
    return 1 if failed else 0


def heading(world, width: int = MESH) -> str:
    """What the table shows, and its column heads."""
    ranks = "ranks are threads of this process" if world.kind == "threads" else f"ranks are {count(world.size, 'process', 'processes')}"
    return (f"refpar verify: the sharded run beside the single process; {ranks}\n"
            "  errors    the largest, in units of the bound 32 eps sqrt(n) scale: at most 1 is equal\n"
            "  held      largest share of the weights, and of what backward needs, that a rank held / what its placements allow\n"
            "  sent      bytes on each axis, all ranks and steps together = formula\n"
            "  work      floating-point operations of all ranks beside the single process's, and what is done more than once\n\n"
            f"{'model':<15}{'mesh':<{width}}" + "".join(f"{head:>9}" for head in HEADS) + f"{'held weights':>14}{'saved':>14}  sent, work")


def line(situation: Situation, judgement: Judgement, width: int) -> str:
    """One situation's row."""
    name = next((name for name, model in PRESETS.items() if model == situation.model), describe_model(situation.model))
    books = judgement.books
    held = "".join(f"{f'{share:.1%}/{allowed:.1%}':>14}" for share, allowed in books.held.values())
    sent = "  ".join(f"{axis}: {counted:,} {'=' if counted == formula else '!='} {formula:,}"
                     for axis, (counted, formula) in books.sent.items())
    return (f"{name:<15}{named(situation.layout):<{width}}" + "".join(f"{judgement.errors[kind]:>9.2g}" for kind in KINDS)
            + f"{held}  {sent}  {work(books)}  {'FAILS' if judgement.complaint else 'equal'}")


def named(layout: Layout) -> str:
    """The mesh, and how its cuts are filled where that is not as usual."""
    fillings = [flag if getattr(layout, field) is True else str(getattr(layout, field)) for flag, field in FILLINGS.items()
                if getattr(layout, field) != getattr(Layout(), field)]
    return " ".join([str(layout), *fillings])


def work(books: Books) -> str:
    """Of all ranks, in percent of the single process's, and which terms make the difference."""
    terms = ", ".join(f"{term} {share:+.1%}" for term, share in books.extra.items())
    return f"work {1 + sum(books.extra.values()):.1%}" + (f" ({terms})" if terms else "")


def ending(job: Job, failed: list[str], world) -> str:
    """The verdict, the meshes left out, and what to type next."""
    lines = [""]
    lines += [f"left out, {why}" for why in job.left_out]
    lines += failed or [f"VERIFIED: {count(len(job.situations), 'sharded run equals', 'sharded runs equal')} the single process"]
    if world.kind == "threads":
        lines.append("the same on real processes:   mpiexec -n 4 python -m mpi4py -m refpar verify")
    return "\n".join(lines + ["", "next:  mpiexec -n 2 python -m mpi4py -m refpar train --model llama --mesh dp=2",
                              "       python lessons/03_data_parallel.py",
                              "       python -m refpar verify --fault mean-of-means"])


def count(number: int, one: str, more: str) -> str:
    """ "1 sharded run equals", "2 sharded runs equal". """
    return f"{number} {one if number == 1 else more}"


def as_json(situation: Situation, judgement: Judgement) -> dict:
    """One situation and its judgement, for a program to read."""
    return {"command": situation.command(), "errors": judgement.errors, **judgement.books._asdict(), "wrong": judgement.wrong,
            "complaint": judgement.complaint}


def list_faults(world) -> int:
    """Every fault of the catalogue: its name, the public report it comes from, and what happened there."""
    from refpar.oracle.faults import FAULTS
    if world.main:
        for fault in FAULTS:
            print(f"{fault.name:<29}{fault.report}\n{textwrap.fill(fault.summary, 100, initial_indent=INDENT, subsequent_indent=INDENT)}")
    return 0


def run_fault(world, name: str) -> int:
    """Plant one fault, run the situation that shows it, and end red: exit status 1, as a broken program would."""
    from refpar.oracle.faults import fault_named, property_of
    from refpar.oracle.plant import PlantedWorld
    fault = fault_named(name)
    warnings.simplefilter("ignore", RuntimeWarning)         # faulty code takes the log of nothing
    try:
        property_of(fault)(PlantedWorld(world, fault), fault.shows)
        sentence = f"NOT SEEN: {name} is planted, and {fault.property} holds all the same"
        if world.kind == "processes":
            sentence += f"; ranks as threads see it:  python -m refpar verify --fault {name}"
    except Exception as error:
        again = "python -m refpar verify"
        told = error if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        sentence = f"FAILS: {told}".replace(again, f"{again} --fault {name}")
    if world.main:
        print(f"planted: {fault.name}, in {fault.function}\n  {fault.summary}\n  reported as {fault.report}\n"
              f"property: {fault.property}\n{sentence}")
    return 1


def _silent(*_):
    """Say nothing."""
