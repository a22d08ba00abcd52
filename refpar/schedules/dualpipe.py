"""DualPipe: two pipelines through the same ranks, from both ends at once (DeepSeek-V3, section 3.2.1).

Each rank holds two stages, one of each copy of the model.  In the steady part it runs a forward of one direction and a
backward of the other as one slot, so that each hides the messages of the other.  Even micro-batches go down, odd ones up.
"""
from __future__ import annotations

from refpar.parallel.schedule import Op
from refpar.plan.bubble import Sizes


class _Row:
    """One rank's list while it is written.  near: the direction that enters at this rank's end of the pipe; far: the other."""

    def __init__(self, rank: int, p: int):
        down, up = (0, rank), (1, 2 * p - 1 - rank)             # (copy, stage)
        self.way = {"near": down, "far": up} if rank < p // 2 else {"near": up, "far": down}
        self.slots: list[tuple[Op, ...]] = []
        self.next = {(kind, way): 0 for kind in "FB" for way in self.way}
        self.kept: list[Op] = []                                # W that are still to be done, oldest first

    def op(self, kind: str, way: str) -> Op:
        copy, stage = self.way[way]
        micro = 2 * self.next[kind[0], way] + copy
        self.next[kind[0], way] += 1
        if kind == "B":
            self.kept.append(Op("W", stage, micro))
        return Op(kind, stage, micro)

    def add(self, *jobs: tuple[str, str]):
        """A slot of one op, or of a pair."""
        self.slots.append(tuple(self.op(*job) for job in jobs))

    def settle(self):
        """The oldest W that was kept back."""
        self.slots.append((self.kept.pop(0),))


def dualpipe(s: Sizes) -> dict:
    """The eight parts of a rank's list, by its distance from its end of the pipe; made for an even number of at least 2p."""
    if s.p % 2:
        raise ValueError(f"schedule dualpipe: {s.p} ranks must be an even number, for its two directions meet in the middle")
    each = max(s.m + s.m % 2, 2 * s.p) // 2                     # micro-batches of a direction
    rows = []
    for rank in range(s.p):
        row, depth = _Row(rank, s.p), min(rank, s.p - 1 - rank)
        inner = s.p // 2 - 1 - depth                            # ranks between this one and the middle
        for _ in range(2 * inner):
            row.add(("F", "near"))
        for _ in range(depth + 1):
            row.add(("F", "near"))
            row.add(("F", "far"))
        for _ in range(inner):
            row.add(("B", "far"))
            row.settle()
            row.add(("F", "far"))
        for i in range(each - s.p + depth + 1):
            if i == 0 and inner == 0:                           # in the middle a pair would hold up both neighbours
                row.add(("F", "near"))
                row.add(("BW", "far"))
            else:
                row.add(("F", "near"), ("BW", "far"))
            row.add(("F", "far"), ("BW", "near"))
        for _ in range(inner):
            row.add(("BW", "far"))
            row.add(("F", "far"), ("BW", "near"))
        for i in range(2 * (depth + 1)):                        # the second half of these keeps W back, to fill what follows
            row.add(("BW" if i <= depth else "B", "near" if i % 2 else "far"))
        for _ in range(inner):
            row.settle()
            row.add(("B", "near"))
        while row.kept:
            row.settle()
        rows.append(row.slots)
    return {"rows": rows, "places": (*range(s.p), *reversed(range(s.p))), "copies": 2}
