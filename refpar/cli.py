"""The command line: one table of options and one of commands.

An option is declared once and means the same in every command; a command names those that it takes.  A command is a module of
`refpar/commands/` with two functions:

    prepare(world, args) -> job         every refusal: ValueError, one sentence with the numbers.  Nothing is written.
    run(world, job) -> exit status      what fails here is a failed run, and keeps its traceback

Under mpiexec every process runs `main`, and one of them prints.  Processes that were told to do the same may still see different
files, so they first agree whether all of them can: a refusal of one is a refusal of all, with exit status 2.
"""
from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, Callable, NamedTuple

from refpar.config import CP_ATTENTION, CP_MAMBA, FILLINGS, PRESETS, RECOMPUTE, SCHEDULES, Layout, Training

REFUSED = 2             # exit status of what was not even begun; 1 is a run that failed
LARGEST = 2**63 - 1     # of whole numbers
THREADS = 256           # ranks at most, where they are threads


def whole(least: int) -> Callable:
    """Parser of a whole number."""
    def parse(text: str) -> int:
        if not text.isascii() or not text.removeprefix("-").isdigit() or int(text) < least:
            raise ValueError(f"must be a whole number of at least {least}, not {text!r}")
        if int(text) > LARGEST:
            raise ValueError(f"must be at most {LARGEST}, not {text!r}")
        return int(text)
    return parse


def number(text: str) -> float:
    """Parser of a number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"must be a number of at least 0, not {text!r}")
    return value


def exact(text: str) -> Fraction:
    """Parser of a number that is not negative, kept as it was written: 0.1 is a tenth."""
    number(text)
    return Fraction(text)


def portion(text: str) -> float:
    """Parser of a share of a whole."""
    value = number(text)
    if value > 1:
        raise ValueError(f"must be a number from 0 to 1, not {text!r}")
    return value


def filled(text: str) -> str:
    """Parser of any text but an empty one."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def path(text: str) -> Path:
    """Parser of the name of a file or folder."""
    return Path(filled(text))


def listed(parse: Callable) -> Callable:
    """Parser of values with commas between them."""
    return lambda text: tuple(parse(part) for part in text.split(","))


def switch(text: str) -> tuple[int, str]:
    """Parser of a step and a mesh, "100:tp=2"."""
    step, _, mesh = text.partition(":")
    if not mesh:
        raise ValueError(f"must be a step and a mesh, such as 100:dp=2,tp=2, not {text!r}")
    return whole(1)(step), mesh


def one_of(*words: str) -> Callable:
    """Parser of a word out of a few."""
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {' or '.join(words)}, not {text!r}")
        return text
    return parse


class Option(NamedTuple):
    """parse: the text that follows the flag -> its value; None: a flag that stands alone."""
    parse: Callable | None
    metavar: str
    help: str


# Flag (without the dashes) -> option.  What is not given is None, or False for a flag that stands alone.
OPTIONS: dict[str, Option] = {
    "model": Option(filled, "NAME[,field=value...]", f"the model: {', '.join(PRESETS)}, with fields changed, or a FILE.json of them"),
    "mesh": Option(filled, "dp=2,tp=2", "ranks on each axis of the mesh: dp, pp, cp, tp (left out: 1)"),
    "order": Option(filled, "dp,pp,cp,tp", "the axes of the mesh, outermost first"),
    "sp": Option(None, "", "sequence parallelism: outside the layers, tp cuts the sequence"),
    "cp": Option(one_of(*CP_ATTENTION), "WAY", f"attention over cp: {', '.join(CP_ATTENTION)} (default: {CP_ATTENTION[0]})"),
    "cp-mamba": Option(one_of(*CP_MAMBA), "WAY", f"conv and scan over cp: {', '.join(CP_MAMBA)} (default: {CP_MAMBA[0]})"),
    "tp-ring": Option(None, "", "with --sp: gather and multiply, multiply and scatter, in the steps of a ring"),
    "schedule": Option(one_of(*SCHEDULES), "NAME", f"of the pipeline's stages: {', '.join(SCHEDULES)} (default: {SCHEDULES[0]})"),
    "each-schedule": Option(None, "", "every schedule that the mesh can have, in turn; with several micro-batches"),
    "virtual-stages": Option(whole(1), "N", "stages of each rank, of the schedule interleaved (default: 2)"),
    "slices": Option(whole(1), "N", "into which the schedule sliced cuts each row (default: 2)"),
    "by-cost": Option(None, "", "stages of equal cost; without it, of as many layers"),
    "recompute": Option(filled, "WHAT", f"what backward computes again: {', '.join(RECOMPUTE)} (default: none), or layers: mlp+mamba1"),
    "steps": Option(whole(1), "N", "training steps"),
    "rows": Option(whole(1), "N", "sequences of one step, over all ranks"),
    "sequence": Option(whole(1), "N", "tokens of a row"),
    "micro-batches": Option(whole(1), "N", "micro-batches into which each rank cuts its rows"),
    "micro-batch-size": Option(whole(1), "N", "rows of one micro-batch; with --micro-batches it sets --rows"),
    "optimizer": Option(one_of("adamw", "sgd"), "NAME", "adamw or sgd"),
    "rate": Option(number, "X", "the highest learning rate"),
    "clip": Option(number, "X", "largest global norm of the gradient; 0 clips nothing"),
    "seed": Option(whole(0), "N", "of the weights, the batches and dropout"),
    "dtype": Option(one_of("float32", "float64"), "NAME", "float32 or float64"),
    "text": Option(path, "FILE", "UTF-8 text to train on (default: the Python language reference)"),
    "out": Option(path, "DIR", "folder of the run: log and checkpoints (default: one under runs/)"),
    "resume": Option(None, "", "go on from the last checkpoint of the folder, bitwise as if never stopped; the number of steps stays"),
    "switch": Option(switch, "STEP:MESH", "go on with another mesh, of as many ranks, after so many steps"),
    "save-every": Option(whole(1), "N", "steps between checkpoints (default: 100)"),
    "no-control": Option(None, "", "after a preset's own run, do not train the same model with its mixer cut out"),
    "sample": Option(whole(0), "N", "bytes of text to write at the end (default: 300)"),
    "uneven": Option(None, "", "models whose sizes no mesh divides"),
    "last-rows": Option(whole(1), "N", "rows of the last step, an incomplete window"),
    "documents": Option(listed(whole(1)), "3,5", "lengths of the random documents that rows are packed with"),
    "ignored": Option(listed(portion), "0,0.5", "share of each row's targets to ignore, row by row, over and over"),
    "fault": Option(filled, "NAME", "plant this fault first: the run must then end red"),
    "list-faults": Option(None, "", "list the faults that can be planted"),
    "size": Option(whole(0), "N", "elements of the array that is sent (default: two for each rank)"),
    "algorithm": Option(str, "NAME", "of the collective, such as ring or doubling (default: what refpar would choose)"),
    "node": Option(whole(1), "N", "ranks of one node, numbered in a row (default: all)"),
    "cases": Option(listed(str), "NAME,...", "which cases to measure, or all (default: a few)"),
    "rounds": Option(whole(1), "N", "rounds of each case"),
    "costs": Option(listed(exact), "F,B,W", "times of a stage's forward, backward to activations, and to weights (default: 1,1,1)"),
    "latency": Option(exact, "X", "time of a message between two stages (default: 0)"),
    "plot": Option(path, "FILE", "a picture of the schedule, such as schedule.svg (needs the extra plot)"),
    "json": Option(None, "", "print JSON in place of tables"),
    "trace": Option(path, "FILE", "write what each rank did when: JSON for Perfetto or chrome://tracing; a chart where FILE is .txt"),
}

class Command(NamedTuple):
    """words: what stands between the command and its options, each name with what it may be."""
    summary: str
    words: dict[str, str]
    options: tuple[str, ...]
    examples: tuple[str, ...]


COMMANDS: dict[str, Command] = {
    "train": Command(
        "Train a model on text, over the ranks of a mesh, and judge it on text that was held out.", {},
        ("model", "mesh", "order", *FILLINGS, "text", "steps", "rows", "sequence", "micro-batches", "micro-batch-size", "optimizer", "rate",
         "clip", "seed", "dtype", "out", "save-every", "resume", "switch", "no-control", "sample", "json", "trace"),
        ("python -m refpar train --model llama",
         "mpiexec -n 4 python -m mpi4py -m refpar train --model mamba2 --mesh dp=2,tp=2 --sp",
         "python -m refpar train --model llama,blocks=2 --steps 50 --rows 8 --text book.txt")),
    "verify": Command(
        "Prove that sharded runs equal the single-process run: outputs, gradients, weights, memory and bytes.", {},
        ("model", "mesh", "order", *FILLINGS, "each-schedule", "steps", "rows", "sequence", "micro-batches", "optimizer", "rate", "clip",
         "seed", "dtype", "uneven", "last-rows", "documents", "ignored", "fault", "list-faults", "json", "trace"),
        ("python -m refpar verify",
         "mpiexec -n 4 python -m mpi4py -m refpar verify --uneven",
         "python -m refpar verify --list-faults")),
    "show": Command(
        "Draw a layout in the terminal.  No model is run.",
        {"what": "mesh: ranks and their groups; shards: what each rank holds of each weight; messages: those of one collective or layer; "
                 "volumes: what a layer sends as the sequence grows; work: its FLOPs, term by term; "
                 "schedule: a pipeline's, with its bubble",
         "collective": "for messages: a collective, such as all_reduce, or a layer, such as attention"},
        ("model", "mesh", "order", *FILLINGS, "sequence", "micro-batches", "costs", "latency", "size", "algorithm", "plot", "trace",
         "json"),
        ("python -m refpar show mesh --mesh dp=2,pp=2,tp=2",
         "python -m refpar show shards --model llama --mesh cp=2,tp=2 --sp --cp zigzag",
         "python -m refpar show messages attention --mesh tp=2 --sp",
         "python -m refpar show volumes --mesh cp=8 --sequence 1048576",
         "python -m refpar show work --mesh tp=8 --sequence 4096",
         "python -m refpar show schedule --mesh pp=4 --schedule zb-h1 --costs 3,4,2",
         "python -m refpar show messages all_reduce --mesh dp=4 --algorithm ring")),
    "bench": Command(
        "Measure refpar beside what others use.",
        {"what": "collectives, beside the MPI library's own; crossover, of a ring and a tree; step (of training) or scan (Mamba's), "
                 "beside PyTorch and Hugging Face"},
        ("cases", "rounds"),
        ("mpiexec -n 2 python -m mpi4py -m refpar bench collectives",
         "python -m refpar bench step --cases llama-128,mamba2-256",
         "python -m refpar bench scan")),
}


def attribute(flag: str) -> str:
    """ "micro-batches" -> "micro_batches". """
    return flag.replace("-", "_")


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one sentence."""

    def error(self, message: str):
        raise ValueError(message)


def _parser(name: str, command: Command) -> _Parser:
    def layout(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100)
    parser = _Parser(prog=f"python -m refpar {name}", usage=_usage(name, command), description=command.summary, allow_abbrev=False,
                     formatter_class=layout, epilog="examples:\n" + "\n".join(f"  {line}" for line in command.examples))
    for word, text in command.words.items():
        parser.add_argument(word, nargs="?", metavar=word.upper(), help=text)
    for flag in command.options:
        option = OPTIONS[flag]
        kind = {"action": "store_true"} if option.parse is None else {"metavar": option.metavar}
        parser.add_argument(f"--{flag}", help=option.help, **kind)
    return parser


def _usage(name: str, command: Command) -> str:
    return " ".join([f"python -m refpar {name}", *(f"[{word.upper()}]" for word in command.words), "[options]"])


def parse(name: str, words: list[str]) -> argparse.Namespace:
    """The arguments of a command, each turned into its value; ValueError, one sentence, for what cannot be."""
    command = COMMANDS[name]
    try:
        args = _parser(name, command).parse_args(words)
    except ValueError as error:
        raise ValueError(f"{error} (python -m refpar {name} --help lists the options)") from None
    for flag in command.options:
        option, text = OPTIONS[flag], getattr(args, attribute(flag))
        if option.parse is not None and text is not None:
            setattr(args, attribute(flag), _value(flag, option.parse, text))
    return args


def _value(flag: str, parse: Callable, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"--{flag} {error}") from None


def layout_of(args: argparse.Namespace, mesh: str) -> Layout:
    """The layout of a mesh such as "dp=2,tp=2", ordered and filled as the options say."""
    given = {field: getattr(args, attribute(flag)) for flag, field in FILLINGS.items()}
    layout = Layout.parse(mesh, args.order)
    return dataclasses.replace(layout, **{field: value for field, value in given.items() if value is not None})


def training_of(args: argparse.Namespace, base: Training, ranks: int) -> Training:
    """`base`, changed by the options that bear the names of its fields.  ranks: those that share the rows of a step (dp)."""
    given = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Training)}
    training = dataclasses.replace(base, **{name: value for name, value in given.items() if value is not None})
    size = args.micro_batch_size
    if size is None:
        return training
    if given["rows"] is None:
        return dataclasses.replace(training, rows=size * training.micro_batches * ranks)
    if given["micro_batches"] is None:
        training = dataclasses.replace(training, micro_batches=max(1, training.rows // (size * ranks)))
    if training.rows != size * training.micro_batches * ranks:
        raise ValueError(f"--rows {training.rows} must be --micro-batch-size {size} x {training.micro_batches} micro-batches "
                         f"x dp={ranks}, which is {size * training.micro_batches * ranks}")
    return training


def check_ranks(world, layout: Layout):
    """ValueError where the mesh has more ranks than threads can stand for."""
    if world.kind == "threads" and layout.ranks > THREADS:
        raise ValueError(f"mesh {layout} has {layout.ranks} ranks, and at most {THREADS} can be threads of one process")


def overview() -> str:
    """What `python -m refpar` alone prints."""
    lines = [f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["refpar: the reference implementation of large-language-model parallelism", "",
                      "usage: python -m refpar COMMAND [options]", "", *lines, "",
                      "python -m refpar COMMAND --help lists the options of a command.",
                      "mpiexec -n 4 python -m mpi4py -m refpar COMMAND ... runs it on real processes; alone, ranks are threads."])


def main(argv: list[str] | None = None) -> int:
    """Run a command; the exit status."""
    from refpar.launch import launched
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    return launched(lambda world: command_of(world, *words))


def command_of(world, name: str, *words: str) -> int:
    """Help, or a command: prepared on every process, and run if none refuses."""
    if name in ("-h", "--help", "help"):
        return tell(world, overview())
    if name not in COMMANDS:
        return refuse("", f"there is no command {name!r}; the commands are {', '.join(COMMANDS)}", world.main)
    if {"-h", "--help"} & set(words):
        return tell(world, _parser(name, COMMANDS[name]).format_help().rstrip())
    command = importlib.import_module(f"refpar.commands.{name}")
    job, refusal = None, None
    try:
        job = command.prepare(world, parse(name, list(words)))
    except ValueError as error:
        refusal = str(error)
    refusals = [sentence for sentence in world.run(_say, world.size or 1, refusal) if sentence is not None]
    return refuse(name, refusals[0], world.main) if refusals else command.run(world, job)


def _say(wire, refusal: str | None) -> str | None:
    """The program of the agreement: each process's refusal, if it has one."""
    return refusal


def tell(world, text: str) -> int:
    """Print on the main process."""
    if world.main:
        print(text)
    return 0


def refuse(name: str, sentence: str, printing: bool) -> int:
    """One sentence on stderr, and the exit status."""
    if printing:
        sys.stderr.write(f"refpar{' ' if name else ''}{name}: {sentence}\n")
    return REFUSED
