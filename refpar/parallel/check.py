"""A schedule is checked before the first message: complete, ordered, within its memory, and free of deadlock.

What is wrong is told in one sentence, with the grid and the place in brackets.  Deadlock is judged for the hardest wire, on which a
send ends only when its receive is posted (a rendezvous).  Each rank does as the runner does: for every step in turn it posts the
receives of the next one, waits for its own, runs, posts its sends, and waits for those of the step before.  Buffered wires would hide
a deadlock, and the schedule would hang on another machine (F9 of the catalogue of faults).
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from refpar.parallel.schedule import Op, Schedule, Step, text


class Rule(NamedTuple):
    """How a runner treats messages: how many steps ahead of its own a receive is posted, how many behind it a send is waited for.
    With (0, 0), plain blocking calls, neighbours that send to each other hang."""
    ahead: int = 1
    behind: int = 1


def check(schedule: Schedule, rule: Rule = Rule()):
    """Refuse a schedule that cannot be obeyed: ValueError."""
    where = _complete(schedule)
    _ordered(schedule, where)
    for rank, (held, bound) in enumerate(zip(in_flight(schedule), schedule.bound)):
        most, at = max((count, -at) for at, count in enumerate([0, *held]))
        if most > bound:
            _refuse(schedule, f"rank {rank} holds activations of {most} ops, and its bound is {bound}", (rank, -at - 1))
    _alive(schedule, where, rule)


def in_flight(schedule: Schedule) -> list[list[int]]:
    """How many ops' activations each rank holds after each step's forward: from F to W; forward alone keeps nothing."""
    held = []
    for row in schedule.rows:
        count, counts = 0, []
        for step in row:
            kinds = [part.kind for op in step for part in op.parts]
            count += kinds.count("F") * schedule.backward
            counts.append(count)
            count -= kinds.count("W")
        held.append(counts)
    return held


def _refuse(schedule: Schedule, sentence: str, *places: tuple[int, int]):
    raise ValueError(f"schedule {schedule.name}: {sentence}\n{schedule.grid(frozenset(places))}")


def _complete(schedule: Schedule) -> dict[Op, tuple[int, int]]:
    """Every piece of work once, on its stage's rank, and no other: (rank, index of the step) of each."""
    wanted = {Op(kind, stage, micro, slice) for micro in range(schedule.micros) for slice in range(schedule.slices)
              for stage in range(len(schedule.places)) if stage // schedule.depth == micro % schedule.copies
              for kind in ("FBW" if schedule.backward else "F")}
    where: dict[Op, tuple[int, int]] = {}
    for rank, at, op in schedule.ops():
        for part in op.parts:
            if part not in wanted:
                _refuse(schedule, f"{op} on rank {rank} is no work of this schedule", (rank, at))
            if schedule.places[op.stage] != rank:
                _refuse(schedule, f"{op} stands on rank {rank}, and rank {schedule.places[op.stage]} holds stage {op.stage}", (rank, at))
            if part in where:
                _refuse(schedule, f"{part} is done twice", where[part], (rank, at))
            where[part] = rank, at
    for op in sorted(wanted - set(where), key=lambda op: op[::-1]):
        rank = schedule.places[op.stage]
        _refuse(schedule, f"{op} is missing on rank {rank}", *((rank, at) for at in range(len(schedule.rows[rank]))))
    return where


def _ordered(schedule: Schedule, where: dict[Op, tuple[int, int]]):
    """What an op needs of its own rank stands before it; what it needs of another arrives in the order in which that one sends."""
    taken: dict[tuple[str, int], tuple[int, int, Op]] = {}                  # (kind, stage) -> (step that sent, step that took, op)
    for rank, at, op in schedule.ops():
        for need in schedule.needs(op):
            there, before = where[need]
            if there == rank and before >= at:
                _refuse(schedule, f"{op} needs {need}, which stands {'behind it' if before > at else 'in the same step'} on rank {rank}",
                        (rank, at), (rank, before))
            if there != rank:
                latest, place, other = taken.get((need.kind, op.stage), (-1, at, op))
                if before < latest:
                    _refuse(schedule, f"{op} stands behind {other} on rank {rank}, and rank {there} sends {need} before what that takes",
                            (rank, at), (rank, place))
                taken[need.kind, op.stage] = before, at, op


@dataclass
class _Walk:
    """All ranks, walked as far as they come.  at: steps that each has run.  sent: of each (kind, stage) on it, the messages that it has
    not yet waited for, oldest first, as (op, peer, step of the peer that receives)."""
    schedule: Schedule
    where: dict[Op, tuple[int, int]]
    rule: Rule

    def __post_init__(self):
        rows = self.schedule.rows
        self.at, self.sent = [0 for _ in rows], [defaultdict(list) for _ in rows]
        receives = [[any(self.where[need][0] != rank for op in step for need in self.schedule.needs(op)) for step in row]
                    for rank, row in enumerate(rows)]
        self.received = [[0, *accumulate(row)] for row in receives]         # steps that receive, among the first so many
        while sum([self.go(rank) for rank in range(len(rows))]):
            pass

    def go(self, rank: int) -> int:
        """Let a rank run until it waits; how many moves it made."""
        moves = 0
        while not self.ended(rank) and not self.waits(rank):
            if (owed := self.owed(rank)):
                owed.pop(0)
            else:
                self.run(rank, self.schedule.rows[rank][self.at[rank]])
            moves += 1
        return moves

    def run(self, rank: int, step: Step):
        for op in step:
            if (taker := self.schedule.taker(op)) is not None:
                peer, there = self.where[Op(op.kind[0], taker, *op[2:])]
                self.sent[rank][op.kind[0], op.stage] += [(op, peer, there)] * (peer != rank)
        self.at[rank] += 1

    def ended(self, rank: int) -> bool:
        return self.at[rank] == len(self.schedule.rows[rank]) and not self.owed(rank)

    def owed(self, rank: int) -> list:
        """The messages whose oldest this rank must wait for before it goes on."""
        behind = self.rule.behind if self.at[rank] < len(self.schedule.rows[rank]) else 0
        return next((messages for messages in self.sent[rank].values() if len(messages) > behind), [])

    def posted(self, rank: int) -> int:
        """How many of its steps that receive have their receives posted: those that it ran or waits in, and `ahead` more."""
        at = min(self.at[rank] + (not self.owed(rank)), len(self.schedule.rows[rank]))
        return self.received[rank][at] + self.rule.ahead

    def waits(self, rank: int) -> str:
        """What keeps a rank from going on, in words; nothing where it may."""
        for op, peer, there in self.owed(rank)[:1]:
            return f"rank {rank} waits until rank {peer} takes {op}" if self.received[peer][there] >= self.posted(peer) else ""
        step = self.schedule.rows[rank][self.at[rank]]
        return next((f"rank {rank} waits before {text(step)} for {need} of rank {self.where[need][0]}"
                     for op in step for need in self.schedule.needs(op) if self.at[self.where[need][0]] <= self.where[need][1]), "")


def _alive(schedule: Schedule, where: dict[Op, tuple[int, int]], rule: Rule):
    """Refuse what hangs where a send ends only when its receive is posted."""
    walk = _Walk(schedule, where, rule)
    stuck = [rank for rank in range(len(walk.at)) if not walk.ended(rank)]
    if stuck:
        places = [(rank, where[Op(owed[0][0].kind[0], *owed[0][0][1:])][1] if (owed := walk.owed(rank)) else walk.at[rank])
                  for rank in stuck]
        _refuse(schedule, f"deadlock: {'; '.join(walk.waits(rank) for rank in stuck)}", *places)
