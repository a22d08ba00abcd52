"""What all lessons share: how a page is opened, run on ranks, checked and closed.

A lesson is a function `teach(page)` that reads from top to bottom.  It says sentences, runs programs on all ranks, and checks what
came out.  The page prints on one rank only, so lines never mix, and closes with one verdict line and the exit status: 0 if every
check holds, 1 if one does not, 2 if there was nothing to begin with (a wrong option, a file that is missing).

Each rank keeps a diary: the ledger, and every message in order with a copy of what was sent.  From all diaries together follows
the round in which each message travels, and with that the time of a program in messages, on threads and processes alike.

With `--mine FILE` (see `mine.py`) everything runs on threads first, where a mistake is named at once and alike in every process, and
on the processes only if it went well.
"""
from __future__ import annotations

import argparse
import sys
from collections import defaultdict, deque
from contextlib import nullcontext
from itertools import combinations, product
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np

from refpar import watch
from refpar.launch import launched, refuse
from refpar.comm.threads import ThreadWorld
from refpar.mine import Mine, Wrong, load_mine
from refpar.oracle.plant import Fault, PlantedWorld

RANKS = 64              # at most, where they are threads: a page shows every one


class Diary(watch.Ledger):
    """What one rank did: counts (see `Ledger`), and its messages in order, each with a copy of its array."""

    def __init__(self):
        super().__init__()
        self.letters: list[watch.Message] = []

    def message(self, told):
        super().message(told)
        self.letters.append(told._replace(array=told.array.copy()))


class Told(NamedTuple):
    """What one rank brings home: what its program returned, and its diary."""
    result: Any
    diary: Diary


def _watched(wire, program: Callable, *args) -> Told:
    with watch.watching(Diary()) as diary:
        result = program(wire, *args)
    return Told(result, diary)


class Step(NamedTuple):
    """One message of a run, seen from above."""
    round: int
    source: int
    to: int
    operation: str | None
    array: np.ndarray


def steps_of(told: list[Told]) -> list[Step]:
    """Every message of a run, in rounds.

    In one round a rank can send one message and receive one.  A rank sends only after what it did before; a message that finds its
    receiver busy with another one waits for the next round.
    """
    sends, receives = [0] * len(told), [0] * len(told)              # the last round in which a rank did so
    unread = [deque(one.diary.letters) for one in told]
    under_way, steps = defaultdict(deque), []
    while any(unread):
        for rank, letters in enumerate(unread):
            while letters and (letters[0].way == "send" or under_way[letters[0].peer, rank]):
                letter = letters.popleft()
                if letter.way == "send":
                    sends[rank] = max(sends[rank], receives[rank]) + 1
                    under_way[rank, letter.peer].append(sends[rank])
                else:
                    receives[rank] = max(receives[rank] + 1, under_way[letter.peer, rank].popleft())
                    steps.append(Step(receives[rank], letter.peer, rank, letter.operation, letter.array))
    return sorted(steps, key=lambda step: step[:3])


def rounds_of(told: list[Told]) -> int:
    """How many rounds a run took: its time, where every message takes alike long."""
    return max((step.round for step in steps_of(told)), default=0)


def recogniser(held: list[np.ndarray], parts: list[slice]) -> Callable:
    """A function that names what travels: which part of an array, and the addends of which ranks are in it.

    held: the whole numbers that each rank began with.  Two names are given where both fit.
    """
    known: dict[tuple, list[str]] = {(): ["nothing, an empty part"]}
    for ranks in (ranks for size in range(1, len(held) + 1) for ranks in combinations(range(len(held)), size)):
        total = sum(held[rank] for rank in ranks)
        who = "all ranks" if len(ranks) == len(held) else f"rank{'s' * (len(ranks) > 1)} {'+'.join(map(str, ranks))}"
        for label, part in [("everything", slice(None)), *((f"part {j}", part) for j, part in enumerate(parts))]:
            if total[part].size:
                known.setdefault(tuple(total[part].tolist()), []).append(f"{label} of {who}")
    return lambda array: " or ".join(known.get(tuple(array.ravel().tolist()), ["something else"]))


class Page:
    """One run of a lesson.  ranks: how many.  showing: the reader wants each message.  mine, fault: what stands in our place."""

    def __init__(self, world, ranks: int, showing: bool = False, mine: Mine | None = None, fault: Fault | None = None):
        self.world, self.ranks, self.showing, self.mine, self.fault = world, ranks, showing, mine, fault
        self.failed: list[str] = []
        self.checked = 0

    def say(self, *lines: str):
        """Print, once for all ranks."""
        if self.world.main:
            print(*lines, sep="\n")

    def run(self, program: Callable, *args) -> list[Told]:
        """program(wire, *args) on every rank; what each brings home, in their order."""
        for world in self._worlds():
            with self._in_place():
                told = world.run(_watched, self.ranks, program, *args)
        return told

    def call(self, function: Callable, *args):
        """function(*args) here, with the reader's function in its place."""
        with self._in_place():
            return function(*args)

    def judge(self, number: str, properties, situations):
        """The last section, with --mine: the reader's function, by properties(world, situation) of the oracle."""
        if self.mine is None:
            return
        self.say("", f"{number} Your {self.mine.ours.__name__}, judged by the properties that judge ours, in other situations.")
        for prove in properties:
            for world, situation in product(self._worlds(), situations):
                if world.size is None or situation.layout.ranks <= world.size:
                    with self._in_place():
                        prove(world, situation)
            self.check(True, f"{self.mine.path.name}: {prove.__name__} holds in {len(situations)} situations")

    def _worlds(self) -> list:
        """The world, with its fault; for the reader's function strict threads before it: every send waits for its receiver."""
        worlds = [ThreadWorld(seed=1, eager=0)] * bool(self.mine) + [self.world]
        return [PlantedWorld(world, self.fault) for world in worlds] if self.fault else worlds

    def _in_place(self):
        return self.mine.in_place() if self.mine else nullcontext()

    def show(self, told: list[Told], name: Callable = str):
        """With --show: every message of the run, one line a step.  name(array): what it is."""
        if self.showing:
            for step in steps_of(told):
                self.say(f"  round {step.round:>2}   rank {step.source} -> rank {step.to}   {step.operation or 'message':<14} "
                         f"{step.array.nbytes:>5} bytes   {name(step.array)}")

    def check(self, holds: bool, sentence: str):
        """One line, and a part of the verdict."""
        self.checked += 1
        self.say(f"  {'ok   ' if holds else 'WRONG'} {sentence}")
        if not holds:
            self.failed.append(f"This does not hold: {sentence}.")

    def prove(self, prove: Callable, situation, sentence: str):
        """One check: a property of the oracle holds in a situation, in this page's world."""
        for world in self._worlds():
            with self._in_place():
                try:
                    wrong = prove(world, situation)
                except (AssertionError, ValueError) as error:
                    wrong = error
        self.check(not wrong, f"{sentence}: {wrong}" if wrong else sentence)

    def compare(self, told: list[Told], promised: list[tuple[int, int]]):
        """Check the messages and bytes that each rank sent against those that a formula promises."""
        counted = [diary.sent() for _, diary in told]
        self.check(counted == promised, "messages (bytes) sent by each rank, counted and by the formula: " + in_a_row(counted)
                   + ("" if counted == promised else f" and {in_a_row(promised)}"))

    def verdict(self) -> int:
        """The last line, and the exit status."""
        if self.failed:
            self.say(f"VERDICT: red. {self.failed[0]}")
        else:
            self.say(f"VERDICT: green. All {self.checked} checks hold on {count(self.ranks, 'rank')}.")
        return 1 if self.failed else 0


def count(number: int, thing: str) -> str:
    """1 rank, 2 ranks."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def in_a_row(counted: list[tuple[int, int]]) -> str:
    """3 (64), 3 (56): messages and, in brackets, bytes."""
    return ", ".join(f"{messages} ({size})" for messages, size in counted)


class _Parser(argparse.ArgumentParser):
    """argparse, whose errors are one sentence."""

    def error(self, message: str):
        raise ValueError(message)


class Lesson(NamedTuple):
    """What a lesson hands to `main`."""
    teach: Callable
    mine: Callable | None       # our function that a reader may replace
    gives: Callable | None      # of its arguments: something of the form that it must return
    faults: tuple               # those that can be planted
    ranks: int                  # where nobody says how many


def _parser(lesson: Lesson) -> _Parser:
    mine, faults = lesson.mine, lesson.faults
    parser = _Parser(usage=f"python {sys.argv[0]} [options]", description=lesson.teach.__globals__["__doc__"], allow_abbrev=False,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", metavar="N",
                        help=f"how many ranks, as threads (default: {lesson.ranks}); on processes mpiexec says how many")
    parser.add_argument("--show", action="store_true", help="step through the messages, one line a step")
    if mine:
        parser.add_argument("--mine", metavar="FILE", type=Path, help=f"judge your own {mine.__name__}, of this Python file")
    if faults:
        parser.add_argument("--fault", metavar="NAME", help=f"plant a real fault: {', '.join(fault.name for fault in faults)}")
    return parser


def main(teach: Callable, mine: Callable | None = None, gives: Callable | None = None, faults: tuple = (), ranks: int = 4):
    """Run a lesson as a program, and exit."""
    sys.exit(launched(lambda world: _run(world, Lesson(teach, mine, gives, faults, ranks))))


def _run(world, lesson: Lesson) -> int:
    """Help, a refusal of one process which is a refusal of all, or the lesson; the exit status."""
    parser = _parser(lesson)
    if {"-h", "--help"} & set(sys.argv[1:]):
        if world.main:
            print(parser.format_help().rstrip())
        return 0
    page, refusal = None, None
    try:
        page = _page(world, parser.parse_args(), lesson)
    except ValueError as error:
        refusal = str(error)
    refusals = [sentence for sentence in world.run(_say, world.size or 1, refusal) if sentence]
    if refusals:
        refuse(refusals[0], world)
    return _taught(page, lesson.teach)


def _say(wire, refusal: str | None) -> str | None:
    """One process's refusal: processes may see different files, and what one refuses all refuse."""
    return refusal


def _page(world, args, lesson: Lesson) -> Page:
    """The page that the options ask for; ValueError, one sentence, where there is none."""
    ranks = world.size or lesson.ranks
    if args.ranks is not None:
        if not (args.ranks.isascii() and args.ranks.isdigit() and int(args.ranks) > 0):
            raise ValueError(f"--ranks must be a whole number of at least 1, not {args.ranks!r}")
        if int(args.ranks) > RANKS:
            raise ValueError(f"--ranks must be at most {RANKS}, not {args.ranks}")
        if world.size not in (None, int(args.ranks)):
            raise ValueError(f"--ranks {args.ranks} is for threads; mpiexec has started {world.size} processes that are the ranks")
        ranks = int(args.ranks)
    path, name = getattr(args, "mine", None), getattr(args, "fault", None)
    known = {fault.name: fault for fault in lesson.faults}
    if name is not None and name not in known:
        raise ValueError(f"--fault: there is no fault {name!r} here; there are {', '.join(known)}")
    function = load_mine(path, lesson.mine, lesson.gives, lesson.teach.__globals__) if path else None
    return Page(world, ranks, args.show, function, known[name] if name else None)


def _taught(page: Page, teach: Callable) -> int:
    """Teach, and close the page; what the reader's function cannot do is a failed check."""
    body = "threads of one process" if page.world.kind == "threads" else "processes"
    title, _, _ = teach.__globals__["__doc__"].partition("\n")
    page.say(title, f"world: {count(page.ranks, 'rank')}, {body}", "")
    try:
        teach(page)
    except Wrong as wrong:
        page.failed.append(f"{page.mine.path.name}: {wrong}")
        page.say(*filter(None, [f"  WRONG {page.mine.path.name}: {wrong}", wrong.details]))
    return page.verdict()
