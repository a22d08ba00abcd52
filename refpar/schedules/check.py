"""A schedule is checked before the first message: complete, ordered, within its memory, and free of deadlock.

What is wrong is told in one sentence, with the grid and the place in brackets.  Deadlock is judged for the hardest wire, on which a
send ends only when its receive is posted (a rendezvous): a wire that buffers would hide it, and the schedule would hang on another
machine (F9 of the catalogue of faults).  The promise is for a runner that, for every slot in turn, posts the receives of the next
slot that has any, waits for its own, runs, posts its sends, and waits for the send before that of the same kind and stage.
"""
from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from typing import NamedTuple

from refpar.parallel.schedule import Op, Schedule, text


class Rule(NamedTuple):
    """How a runner treats messages: how many slots that receive ahead of its own a receive is posted, and how many sends of one
    kind and stage may be open when it goes on.  With (0, 0), plain blocking calls, neighbours that send to each other hang."""
    ahead: int = 1
    behind: int = 1


def check(schedule: Schedule, rule: Rule = Rule()):
    """Refuse a schedule that cannot be obeyed: ValueError."""
    where = _complete(schedule)
    _ordered(schedule, where)
    _in_turn(schedule, where)
    for rank, (held, bound) in enumerate(zip(in_flight(schedule), schedule.bound)):
        if (most := max(held, default=0)) > bound:
            _refuse(schedule, f"rank {rank} holds activations of {most} ops, and its bound is {bound}", (rank, held.index(most)))
    _alive(schedule, where, rule)


def in_flight(schedule: Schedule) -> list[list[int]]:
    """How many ops' activations each rank holds while it runs each slot: from F to W; forward alone keeps nothing."""
    kinds = [["".join(op.kind for op in slot) * schedule.backward for slot in row] for row in schedule.rows]
    return [[begun - ended for begun, ended in zip(accumulate(slot.count("F") for slot in row),
                                                   accumulate((slot.count("W") for slot in row), initial=0))] for row in kinds]


def _refuse(schedule: Schedule, sentence: str, *places: tuple[int, int]):
    raise ValueError(f"schedule {schedule.name}: {sentence}\n{schedule.grid(frozenset(places))}")


def _complete(schedule: Schedule) -> dict[Op, tuple[int, int]]:
    """Every piece of work once, on its stage's rank, and no other: (rank, index of the slot) of each."""
    wanted = {Op(kind, stage, micro, slice) for micro in range(schedule.micros) for slice in range(schedule.slices)
              for stage in range(len(schedule.places)) if stage // schedule.depth == micro % schedule.copies
              for kind in ("FBW" if schedule.backward else "F")}
    where: dict[Op, tuple[int, int]] = {}
    for rank, at, op in schedule.ops():
        for part in op.parts:
            if part not in wanted:
                _refuse(schedule, f"{op} on rank {rank} is no work of this schedule", (rank, at))
            if schedule.places[op.stage] != rank:
                _refuse(schedule, f"{op} stands on rank {rank}, and rank {schedule.places[op.stage]} holds stage {op.stage}",
                        (rank, at))
            if part in where:
                _refuse(schedule, f"{part} is done twice", where[part], (rank, at))
            where[part] = rank, at
    for op in sorted(wanted - set(where), key=lambda op: op[::-1]):
        _refuse(schedule, f"{op} is missing on rank {schedule.places[op.stage]}",
                *(place for part, place in where.items() if part[1:] == op[1:]))
    return where


def _ordered(schedule: Schedule, where: dict[Op, tuple[int, int]]):
    """What an op needs of its own rank stands before it."""
    for rank, at, op in schedule.ops():
        for need in schedule.needs(op):
            there, before = where[need]
            if there == rank and before >= at:
                place = "behind it" if before > at else "in the same slot"
                _refuse(schedule, f"{op} needs {need}, which stands {place} on rank {rank}", (rank, at), (rank, before))


def _in_turn(schedule: Schedule, where: dict[Op, tuple[int, int]]):
    """A stage takes what another rank sends to it in the order in which it is sent: one tag for each (kind, stage) will do."""
    latest: dict[tuple[str, int], tuple[int, int, Op]] = {}                 # (kind, stage) -> (slot that sent, slot that took, op)
    for rank, at, op in schedule.ops():
        for need in schedule.needs(op):
            there, sent = where[need]
            if there != rank:
                before, place, other = latest.get((need.kind, op.stage), (-1, at, op))
                if sent < before:
                    _refuse(schedule, f"{op} stands behind {other} on rank {rank}, and rank {there} sends {need} before what it "
                            "takes", (rank, at), (rank, place))
                latest[need.kind, op.stage] = sent, at, op


def _alive(schedule: Schedule, where: dict[Op, tuple[int, int]], rule: Rule):
    """No circle in who waits for whom, where a send ends only when its receive is posted.  Each slot is two events: it runs, when
    what it needs has run and the slot before is over; it is over, when the sends that it has to wait for are met."""
    receives = [[at for at, slot in enumerate(row) if any(where[need][0] != rank for op in slot for need in schedule.needs(op))]
                for rank, row in enumerate(schedule.rows)]
    sent: dict[tuple[str, int], list] = defaultdict(list)                   # (kind, stage) -> (peer, slot that receives) in turn
    waits: dict[tuple[int, int, bool], list] = defaultdict(list)            # (rank, slot, is it over) -> what must come first
    for rank, at, op in schedule.ops():
        waits[rank, at, False] += [(rank, at - 1, True)] * (at > 0) + [(*where[need], False) for need in schedule.needs(op)]
        waits[rank, at, True] += [(rank, at, False)]
        peer, there = where.get(Op(op.kind[0], schedule.taker(op), *op[2:]), (rank, at))
        if peer != rank:
            messages = sent[op.kind[0], op.stage]
            messages.append((peer, there))
            if len(messages) > rule.behind:
                peer, there = messages[len(messages) - 1 - rule.behind]
                order = receives[peer].index(there) - rule.ahead            # posted when the peer comes to that slot that receives
                posted = receives[peer][order] if order >= 0 else 0
                waits[rank, at, True] += [(peer, posted - 1, True)] * (posted > 0)
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as circle:
        _deadlock(schedule, circle.args[1][::-1])


def _deadlock(schedule: Schedule, circle: list[tuple[int, int, bool]]):
    """Tell a circle of events, each of which waits for the next."""
    turns = [event for event, after in zip(circle[1:], circle) if event[0] != after[0]] or circle[:1]
    told = [f"rank {rank} {'with what it sent by' if over else 'before'} {text(schedule.rows[rank][at])}"
            for rank, at, over in turns]
    _refuse(schedule, "deadlock: " + ", waits for ".join([*told, f"rank {turns[0][0]}"]), *(event[:2] for event in turns))
