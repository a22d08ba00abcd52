"""ZB-V: each rank holds two stages, and a micro-batch goes down the ranks and comes back (Qi 2024, "Pipeline parallelism with
controllable memory").

The last stage is on the rank of the first, so backward can begin where forward began, the ranks end together, and the
activations of 2p half stages, 1F1B's most, are enough for no bubble at all where F = B = W.
"""
from __future__ import annotations

from refpar.parallel.schedule import Op
from refpar.plan.bubble import Sizes


class _Row:
    """One rank's list while it is written: down is its stage on the way down, up the one on the way back."""

    def __init__(self, rank: int, p: int):
        self.ops: list[Op] = []
        self.stages = {"down": rank, "up": 2 * p - 1 - rank}
        self.next = {(kind, leg): 0 for kind in "FBW" for leg in self.stages}

    def add(self, *jobs: tuple[str, str]):
        """The next micro-batch of each (kind, leg)."""
        for kind, leg in jobs:
            self.ops.append(Op(kind, self.stages[leg], self.next[kind, leg]))
            self.next[kind, leg] += 1


def zb_v(s: Sizes) -> dict:
    """Warm-up, a steady round of down and up, and an end that W fills; the warm-up is always that of 2p-1 micro-batches."""
    rows = []
    for rank in range(s.p):
        row, before = _Row(rank, s.p), s.p - rank               # ranks from here to the turning point
        row.add(*[("F", "down")] * (2 * before - 1))
        row.add(*[("F", "up"), ("F", "down")] * rank)
        row.add(*[("F", "up"), ("B", "up"), ("W", "up")] * before)
        while row.next["F", "up"] < row.next["F", "down"] or row.next["F", "down"] < s.m:
            row.add(*[("F", "down")] * (row.next["F", "down"] < s.m), ("B", "down"), ("W", "down"))
            row.add(("F", "up"), ("B", "up"), ("W", "up"))
        row.add(*[("B", "down"), ("B", "up")] * rank)
        row.add(*[("B", "down"), ("W", "down")] * before)
        for leg in ("up", "down"):
            row.add(*[("W", leg)] * (row.next["B", leg] - row.next["W", leg]))
        rows.append(row.ops)
    return {"rows": rows, "places": (*range(s.p), *reversed(range(s.p)))}
