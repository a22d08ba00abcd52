"""Which tokens of a row each rank has, where cp, or tp under sequence parallelism, cuts the sequence.

cp cuts the whole row, in the order of `parallel/order.py`; sp then cuts what a cp rank has, in the order in which it has it, between
the layers alone: inside them every tp rank has all tokens of its cp rank.
"""
from __future__ import annotations

import numpy as np

from refpar.config import Layout, Model, share
from refpar.parallel.order import columns, way_of

ROW = 64            # tokens of the row that is drawn
MOST = 16           # lines


def tokens_of(model: Model, layout: Layout) -> dict[tuple[int, int], list[int]]:
    """(cp, tp) -> the columns of a row that a rank there has between the layers; without sp all ranks of tp have the same."""
    way, cuts, found = way_of(model, layout), layout.tp if layout.sp else 1, {}
    for cp in range(layout.cp):
        mine = columns(way, ROW, layout.cp, cp)
        for tp in range(cuts):
            found[cp, tp] = mine[share(mine.size, cuts, tp)].tolist()
    return found


def describe(model: Model, layout: Layout) -> dict:
    """The columns, for a program to read."""
    return {"row": ROW, "order": way_of(model, layout),
            "ranks": [{"cp": cp, "tp": tp if layout.sp else None, "columns": places}
                      for (cp, tp), places in tokens_of(model, layout).items()]}


def draw(model: Model, layout: Layout) -> list[str]:
    """A line for each rank; none where nothing cuts the sequence."""
    held = tokens_of(model, layout)
    if len(held) == 1:
        return []
    axes = " and ".join(["cp"] * (layout.cp > 1) + ["tp"] * layout.sp)
    lines = [f"one row of {ROW} tokens between the layers, cut over {axes}, in the order of {way_of(model, layout)}"]
    for (cp, tp), places in list(held.items())[:MOST]:
        label = f"cp={cp}" * (layout.cp > 1) + " " + f"tp={tp}" * layout.sp
        row = np.full(ROW, ".")
        row[places] = "#"
        lines.append(f"  {label.strip():<12}{''.join(row)}  {len(places):>3}")
    return lines + ["  ..."] * (len(held) > MOST) + [""]
