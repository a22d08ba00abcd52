"""Schedules by name: `generate("1f1b", ranks=4, micros=8)`.  Each is data that `refpar/schedules/check.py` accepts, for any sizes.

p is the number of ranks, m of micro-batches, as in the papers.  Where a paper's rule wants more micro-batches than there are, or a
multiple of p, the schedule is made for as many as it wants and those that do not exist are left out: what was in order stays in
order, and nobody waits for what was left out (fault F10: a warm-up longer than the micro-batches last).
"""
from __future__ import annotations

from typing import Callable

from refpar.parallel.schedule import Op, Schedule
from refpar.plan.bubble import Sizes, held
from refpar.schedules.dualpipe import dualpipe
from refpar.schedules.vshape import zb_v


def wave(p: int, m: int, warm: Callable, lag: Callable | None = None) -> list[list[Op]]:
    """Rank r runs warm(r) forwards ahead, then backward and forward in turn, then the backwards that are left.

    lag: how many W rank r keeps back behind its B, to fill the gaps of its last backwards with; None: backward is not split.
    One rule for GPipe, 1F1B, eager 1F1B and the two zero-bubble schedules made by hand, which differ in `warm` and `lag` alone.
    """
    rows = []
    for rank in range(p):
        ahead, behind = min(warm(rank), m), m if lag is None else min(lag(rank), m)
        row = [Op("F", rank, i) for i in range(ahead)]
        for i in range(m):
            row += [Op("BW" if lag is None else "B", rank, i)]
            row += [Op("W", rank, i - behind)] * (i >= behind)
            row += [Op("F", rank, i + ahead)] * (i + ahead < m)
        row += [Op("W", rank, i) for i in range(m - behind, m)] * (lag is not None)
        rows.append(row)
    return rows


def gpipe(s: Sizes) -> dict:
    """All forwards, then all backwards (Huang 2019)."""
    return {"rows": wave(s.p, s.m, lambda rank: s.m)}


def one_f_one_b(s: Sizes) -> dict:
    """As few forwards ahead as keep the pipe full (PipeDream-Flush, Narayanan 2021)."""
    return {"rows": wave(s.p, s.m, lambda rank: s.p - rank)}


def eager(s: Sizes) -> dict:
    """1F1B with twice the forwards ahead, so that a message has a whole op's time (AlpaComm)."""
    return {"rows": wave(s.p, s.m, lambda rank: 2 * (s.p - rank) - 1)}


def zb_h1(s: Sizes) -> dict:
    """1F1B whose last backwards do not wait for the weight gradients, within the memory of its first rank (Qi 2023, figure 3)."""
    return {"rows": wave(s.p, s.m, lambda rank: s.p - rank, lambda rank: rank)}


def zb_h2(s: Sizes) -> dict:
    """Twice the memory, and no bubble but the skew: rank r starts, and ends, r forwards later.  So the ranks cannot wait for each
    other before the optimizer's step, and it is validated afterwards (Qi 2023, section 4)."""
    return {"rows": wave(s.p, s.m, lambda rank: 2 * (s.p - rank) - 1, lambda rank: 2 * rank)}


def pipedream(s: Sizes) -> dict:
    """1F1B without an end: each backward is followed by an update, and a micro-batch is run backward with the weights that it met
    (Narayanan 2019).  It is no synchronous training, and stands here as the contrast."""
    return one_f_one_b(s) | {"flush": False}


def interleaved(s: Sizes) -> dict:
    """Rank r holds the stages r, p+r, 2p+r, ...: p micro-batches go through one, then through the next (Narayanan 2021)."""
    wanted = -(-s.m // s.p) * s.p
    rounds = [(first, chunk) for first in range(0, wanted, s.p) for chunk in range(s.v)]
    rows = []
    for rank in range(s.p):
        forward = [Op("F", chunk * s.p + rank, first + i) for first, chunk in rounds for i in range(s.p)]
        backward = [Op("BW", (s.v - 1 - chunk) * s.p + rank, first + i) for first, chunk in rounds for i in range(s.p)]
        ahead = min(2 * (s.p - 1 - rank) + (s.v - 1) * s.p + 1, len(forward))
        row = forward[:ahead]
        for i, op in enumerate(backward):
            row += [op, *forward[ahead + i:ahead + i + 1]]
        rows.append(row)
    return {"rows": rows, "places": tuple(range(s.p)) * s.v}


def sliced(s: Sizes) -> dict:
    """GPipe whose micro-batches are cut along the sequence: a slice follows the one before it, which it attends to, and backward
    goes from the last to the first (TeraPipe, Li 2021).  Causal layers only."""
    return {"rows": [[Op("F", rank, i, k) for i in range(s.m) for k in range(s.K)] +
                     [Op("BW", rank, i, k) for i in range(s.m) for k in reversed(range(s.K))] for rank in range(s.p)]}


def forward_only(s: Sizes) -> dict:
    """What inference runs."""
    return {"rows": [[Op("F", rank, i, k) for i in range(s.m) for k in range(s.K)] for rank in range(s.p)], "backward": False}


GENERATORS: dict[str, Callable[[Sizes], dict]] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager, "interleaved": interleaved, "zb-h1": zb_h1, "zb-h2": zb_h2,
    "zb-v": zb_v, "dualpipe": dualpipe, "sliced": sliced, "forward-only": forward_only, "pipedream": pipedream}
TAKES = {"interleaved": {"v"}, "zb-v": {"v"}, "sliced": {"K"}, "forward-only": {"K"}}


def generate(name: str, ranks: int, micros: int, virtual: int | None = None, slices: int | None = None) -> Schedule:
    """The schedule of that name.  virtual: stages a rank, of interleaved (2 if not told).  slices: of the sequence, of sliced (2)
    and forward-only (1)."""
    if name not in GENERATORS:
        raise ValueError(f"schedule {name!r} must be one of {' '.join(GENERATORS)}")
    takes = TAKES.get(name, set())
    for option, value, letter in (("virtual stages", virtual, "v"), ("slices", slices, "K")):
        if value is not None and value != 1 and letter not in takes:
            raise ValueError(f"schedule {name}: {value} {option} were asked for, and it has 1")
    if name == "zb-v" and virtual not in (None, 2):
        raise ValueError(f"schedule zb-v: {virtual} virtual stages were asked for, and its V has 2 on each rank")
    v = 1 if "v" not in takes else virtual if virtual is not None else 2
    K = 1 if "K" not in takes else slices if slices is not None else 1 + (name == "sliced")
    sizes = Sizes(ranks, micros, v, K)
    if min(sizes) < 1:
        raise ValueError(f"schedule {name}: {ranks} ranks, {micros} micro-batches, {v} virtual stages and {K} slices: each must be "
                         "at least 1")
    made = {"places": tuple(range(ranks)), "slices": K} | GENERATORS[name](sizes)
    slots = (((op,) if isinstance(op, Op) else op for op in row) for row in made.pop("rows"))
    rows = tuple(tuple(kept for slot in row if (kept := tuple(op for op in slot if op.micro < micros))) for row in slots)
    return Schedule(name, rows, micros=micros, bound=held(name, sizes), **made)
