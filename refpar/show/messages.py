"""The messages of one collective, drawn round by round: who tells whom, what, and how many bytes.

The collective itself runs, on threads, with arrays whose numbers tell where they come from.  Element j of rank r is
(j+1) M + 2**r with M = 2**p, so a sum of the elements j of some ranks is (j+1) M times their number, plus one bit for each of them:
from any number on the wire we read which element it is, and whose addends it holds.
"""
from __future__ import annotations

from collections import defaultdict, deque
from itertools import groupby
from typing import Callable, NamedTuple

import numpy as np

from refpar.algorithms import ALGORITHMS
from refpar.algorithms.gather import gather, scatter
from refpar.comm import choose, collectives
from refpar.comm.choose import Task
from refpar.comm.mesh import Mesh, groups, nodes
from refpar.comm.threads import ThreadWorld
from refpar.comm.wire import Wire
from refpar.config import Layout, shares
from refpar.plan import volume
from refpar.plan.promise import promised

MOST = 16           # ranks: their messages fit on a screen
LARGEST = 2**20     # elements: (j+1) M p stays below 2**53, and so exact
SEGMENT = 16        # bytes: pipelines send two elements at a time, so that they show


class Sent(NamedTuple):
    """One message.  `round`: one more than the latest message that its sender had to wait for."""
    round: int
    source: int
    to: int
    bytes: int
    what: str


class Tape:
    """What all ranks sent, in one process's memory."""

    def __init__(self):
        self.sent: list[Sent] = []
        self.under_way = defaultdict(deque)         # (source, to) -> rounds of messages not yet received


class TapedWire(Wire):
    """A wire that notes what its rank sends, and sends it by another.  `clock`: the latest round that its rank has waited for.

    The state of a request is the other wire's request, and the round of the message (of a receive, once it is there)."""

    def __init__(self, wire, tape: Tape):
        super().__init__(wire.rank, wire.size)
        self.wire, self.tape, self.clock = wire, tape, 0

    def start(self, request):
        array, peer, tag = request.array, request.peer, request.tag
        if request.way == "recv":
            request.state = self.wire.irecv(array, peer, tag), None
            return
        number = self.clock + 1
        self.tape.sent.append(Sent(number, self.rank, peer, array.nbytes, spelled(array, self.size)))
        self.tape.under_way[self.rank, peer].append(number)
        request.state = self.wire.isend(array, peer, tag), number

    def complete(self, request):
        inner, number = request.state
        inner.wait()
        self.clock = max(self.clock, number or self.tape.under_way[request.peer, self.rank].popleft())


def numbered(count: int, rank: int, size: int, first: int = 0) -> np.ndarray:
    """Elements `first` to `first + count` of a rank's array, float64 [count]."""
    return (np.arange(first, first + count) + 1.0) * 2**size + 2**rank


def spelled(array, size: int) -> str:
    """What a message holds, in words: "x[2:4] of 0+1"."""
    if not array.size:
        return "nothing"
    values = array.ravel().astype(np.int64)
    whose = [tuple(rank for rank in range(size) if value >> rank & 1) for value in values.tolist()]
    places = [value // 2**size // max(1, len(ranks)) - 1 for value, ranks in zip(values.tolist(), whose)]
    pieces = []
    for ranks, run in groupby(zip(whose, places, range(len(places))), key=lambda one: (one[0], one[1] - one[2])):
        run = [place for _, place, _ in run]
        pieces.append(f"x[{run[0]}:{run[len(run) - 1] + 1}] of {'+'.join(map(str, ranks[0]))}")
    return ", ".join(pieces)


def axes_of(layout: Layout) -> list[str]:
    """Every axis with more than one rank: the collective runs over all of them together."""
    return [axis for axis in layout.order if getattr(layout, axis) > 1]


class How(NamedTuple):
    """The algorithm by name (None: what the table chooses), and the ranks of one node (None: all)."""
    algorithm: str | None = None
    node: int | None = None


def program(wire, layout: Layout, name: str, size: int, how: How, tape: Tape):
    """One rank's part in the collective."""
    axis = Mesh(layout, TapedWire(wire, tape), how.node).axis(*axes_of(layout))
    sizes = shares(size, axis.size)
    first, mine = sum(sizes[:axis.index]), sizes[axis.index]
    whole, part = numbered(size, wire.rank, wire.size), numbered(mine, wire.rank, wire.size, first)
    options = {"algorithm": ALGORITHMS[name].get(how.algorithm)} if name in ALGORITHMS else {}
    CALLS[name](whole, part, axis, sizes, options)


def _all_to_all(whole, part, axis, sizes, how):
    """A square of `size` rows and a column for each rank, cut along the columns; it becomes cut along the rows."""
    return collectives.all_to_all(whole[:, None], axis, 0, sizes, 1, [1] * axis.size, **how)


# Name -> (whole array, this rank's part of it, axis, lengths of all parts, options) -> the collective's result.
CALLS: dict[str, Callable] = {
    "all_reduce": lambda whole, part, axis, sizes, how: collectives.all_reduce(whole, axis, segment=SEGMENT, **how),
    "reduce_scatter": lambda whole, part, axis, sizes, how: collectives.reduce_scatter(whole, axis, 0, sizes, **how),
    "all_gather": lambda whole, part, axis, sizes, how: collectives.all_gather(part, axis, 0, sizes, **how),
    "all_to_all": _all_to_all,
    "broadcast": lambda whole, part, axis, sizes, how: collectives.broadcast(whole, axis, segment=SEGMENT, **how),
    "reduce": lambda whole, part, axis, sizes, how: collectives.reduce(whole, axis, segment=SEGMENT, **how),
    "gather": lambda whole, part, axis, sizes, how: gather(part, axis, 0, sizes),
    "scatter": lambda whole, part, axis, sizes, how: scatter(whole, axis, 0, sizes),
    "barrier": lambda whole, part, axis, sizes, how: collectives.barrier(axis),
}


def task_of(name: str, size: int, group: list[int], how: How) -> Task:
    """What all ranks of a group know of the call."""
    sizes = shares(size, len(group))
    blocks = [sizes] * len(group) if name == "all_to_all" else sizes
    return Task(blocks, np.dtype(np.float64), nodes(group, how.node), segment=SEGMENT)


def formula(name: str, i: int, size: int, group: list[int], how: How) -> volume.Volume:
    """What rank i of a group sends by the formula of `plan/volume.py`, in bytes."""
    if name in ALGORITHMS:
        return promised(name, how.algorithm, i, task_of(name, size, group, how))
    return volume.FORMULAS[name](i, shares(size, len(group))).times(8)


def describe(layout: Layout, name: str, size: int, how: How = How()) -> dict:
    """Every message, and what each rank sent beside the formula, for a program to read."""
    tape = Tape()
    ThreadWorld().run(program, layout.ranks, layout, name, size, how, tape)
    totals, lines = [], groups(layout, *axes_of(layout))
    for rank in range(layout.ranks):
        mine = [sent for sent in tape.sent if sent.source == rank]
        group = next(group for group in lines if rank in group)
        told = formula(name, group.index(rank), size, group, how)
        totals.append({"rank": rank, "messages": len(mine), "bytes": sum(sent.bytes for sent in mine),
                       "formula_messages": told.messages, "formula_bytes": told.elements})
    algorithm = how.algorithm
    if algorithm is None and name in ALGORITHMS:
        algorithm = choose.algorithm(name, None, task_of(name, size, lines[0], how)).name
    return {"collective": name, "algorithm": algorithm, "mesh": str(layout), "elements": size,
            "messages": [sent._asdict() for sent in sorted(tape.sent)], "totals": totals}


def draw(told: dict) -> str:
    """The rounds, and the totals."""
    by = f" by {told['algorithm']}" if told["algorithm"] else ""
    lines = [f"{told['collective']}{by} on mesh {told['mesh']}; the array x has {told['elements']} elements of 8 bytes",
             "x[2:4] of 0+1: elements 2 and 3, the sum of what ranks 0 and 1 had"]
    for number, messages in groupby(told["messages"], key=lambda sent: sent["round"]):
        lines += ["", f"round {number}"]
        lines += [f"  {sent['source']:>2} -> {sent['to']:<2} {sent['bytes']:>6} bytes   {shortened(sent['what'])}"
                  for sent in messages]
    lines += ["", f"{'sent by':>7}{'messages':>11}{'formula':>9}{'bytes':>9}{'formula':>9}"]
    lines += [f"{row['rank']:>7}{row['messages']:>11}{row['formula_messages']:>9}{row['bytes']:>9}{row['formula_bytes']:>9}"
              for row in told["totals"]]
    return "\n".join(lines)


def shortened(text: str, width: int = 70) -> str:
    """At most so many columns."""
    return text if len(text) <= width else text[:width - 3] + "..."
