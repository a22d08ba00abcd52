"""A schedule from its text, as `str(schedule)` prints it: a head with the numbers, and a row for each rank.

    schedule 1f1b micros=2 slices=1 copies=1 backward=1 flush=1 places=0,1 bound=2,1
    0: 0F0 0F1  0BW0 0BW1
    1: 1F0 1BW0 1F1  1BW1
"""
from __future__ import annotations

import re

from refpar.parallel.schedule import Op, Schedule

OP = re.compile(r"(\d+)(F|BW|B|W)(\d+)(?:\.(\d+))?")
HEAD = re.compile(r"schedule (\S+) micros=(\d+) slices=(\d+) copies=(\d+) backward=([01]) flush=([01]) places=(\d+(?:,\d+)*) bound=(\d+(?:,\d+)*)")


def parse(told: str) -> Schedule:
    """The schedule that printed as `told`; what it says is for `check` to judge."""
    head, *rows = told.strip().splitlines() or [""]
    found = HEAD.fullmatch(head.strip())
    if found is None:
        raise ValueError(f"{head!r} must be: schedule NAME micros=N slices=N copies=N backward=0|1 flush=0|1 places=N,N,... bound=N,N,...")
    name, *numbers, places, bound = found.groups()
    micros, slices, copies, backward, flush = map(int, numbers)
    return Schedule(name, tuple(_row(rank, row) for rank, row in enumerate(rows)), tuple(map(int, places.split(","))), micros,
                    tuple(map(int, bound.split(","))), slices, copies, bool(backward), bool(flush))


def _row(rank: int, row: str) -> tuple:
    label, _, steps = row.partition(":")
    if label.strip() != str(rank):
        raise ValueError(f"{row!r} must begin with `{rank}:`, for it is the row of rank {rank}")
    return tuple(tuple(_op(word, rank) for word in step.split("+")) for step in steps.split())


def _op(word: str, rank: int) -> Op:
    found = OP.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} on rank {rank} is no op: stage, kind (F, B, W or BW) and micro-batch are written 2F0, a slice 2F0.1")
    return Op(found[2], int(found[1]), int(found[3]), int(found[4] or 0))
