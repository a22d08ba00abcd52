"""Schedules by name: each generator answers with data that `refpar/parallel/check.py` accepts.
"""
from __future__ import annotations

from refpar.parallel.schedule import Op, Schedule


def wave(p, m, warm, lag=None):
    rows = []
    for rank in range(p):
        first = min(warm(rank), m)
        row = [Op("F", rank, i) for i in range(first)]
        for i in range(m):
            row.append(Op("BW" if lag is None else "B", rank, i))
            if lag is not None and i >= lag(rank):
                row.append(Op("W", rank, i - lag(rank)))
            if first + i < m:
                row.append(Op("F", rank, first + i))
        if lag is not None:
            row += [Op("W", rank, i) for i in range(max(m - lag(rank), 0), m)]
        rows.append(tuple((op,) for op in row))
    return tuple(rows)
