"""A schedule is checked before the first message: complete, ordered, within its memory, and free of deadlock.

What is wrong is told in one sentence, with the grid and the place in brackets.  Deadlock is judged for the hardest wire, on which a
send ends only when its receive is posted (a rendezvous).  Each rank does as the runner does: for every step in turn it posts the
receives of the next one, waits for its own, runs, posts its sends, and waits for those of the step before.  Buffered wires would hide
a deadlock, and the schedule would hang on another machine (F9 of the catalogue of faults).
"""
from __future__ import annotations

from dataclasses import dataclass, field
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
    """What an op needs of its own rank stands before it."""
    for rank, at, op in schedule.ops():
        for need in schedule.needs(op):
            there, before = where[need]
            if there == rank and before >= at:
                _refuse(schedule, f"{op} needs {need}, which stands {'behind it' if before > at else 'in the same step'} on rank {rank}",
                        (rank, at), (rank, before))


@dataclass
class _Walk:
    """All ranks, walked as far as they come.  at: steps that each has run.  sent: for each of its last steps whose sends it has not
    waited for, the messages as (op, peer, step of the peer that receives)."""
    schedule: Schedule
    where: dict[Op, tuple[int, int]]
    rule: Rule
    at: list[int] = field(init=False)
    sent: list[list[list]] = field(init=False)

    def __post_init__(self):
        self.at, self.sent = [0 for _ in self.schedule.rows], [[] for _ in self.schedule.rows]
        while sum([self.go(rank) for rank in range(len(self.at))]):
            pass

    def go(self, rank: int) -> int:
        """Let a rank run until it waits; how many moves it made."""
        moves, row = 0, self.schedule.rows[rank]
        while not self.ended(rank) and not self.waits(rank):
            if self.owes(rank):
                self.sent[rank].pop(0)
            else:
                self.sent[rank].append(self.sends(rank, row[self.at[rank]]))
                self.at[rank] += 1
            moves += 1
        return moves

    def ended(self, rank: int) -> bool:
        return self.at[rank] == len(self.schedule.rows[rank]) and not self.sent[rank]

    def owes(self, rank: int) -> bool:
        """Must this rank wait for sends before it goes on?"""
        return len(self.sent[rank]) > self.rule.behind or self.at[rank] == len(self.schedule.rows[rank])

    def sends(self, rank: int, step: Step) -> list:
        takers = [(op, op._replace(kind=op.kind[0], stage=self.schedule.taker(op))) for op in step
                  if self.schedule.taker(op) is not None]
        return [(op, *self.where[taker]) for op, taker in takers if self.where[taker][0] != rank]

    def waits(self, rank: int) -> str:
        """What keeps a rank from going on, in words; nothing where it may."""
        if self.owes(rank):
            for op, peer, step in self.sent[rank][0]:
                if step > self.at[peer] + self.rule.ahead - (len(self.sent[peer]) > self.rule.behind):
                    return f"rank {rank} waits until rank {peer} takes {op}"
            return ""
        step = self.schedule.rows[rank][self.at[rank]]
        for need in [need for op in step for need in self.schedule.needs(op)]:
            there, index = self.where[need]
            if self.at[there] <= index:
                return f"rank {rank} waits before {text(step)} for {need} of rank {there}"
        return ""


def _alive(schedule: Schedule, where: dict[Op, tuple[int, int]], rule: Rule):
    """Refuse what hangs where a send ends only when its receive is posted."""
    walk = _Walk(schedule, where, rule)
    stuck = [rank for rank in range(len(walk.at)) if not walk.ended(rank)]
    if stuck:
        _refuse(schedule, f"deadlock: {'; '.join(walk.waits(rank) for rank in stuck)}",
                *((rank, walk.at[rank] - len(walk.sent[rank]) if walk.owes(rank) else walk.at[rank]) for rank in stuck))
