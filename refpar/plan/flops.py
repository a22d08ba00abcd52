"""Floating-point operations of a training step, by layer and term, on each rank; and the work that ranks do twice.

Counted are matrix products, 2mnk each.  A linear map is three of them, forward and two backward, so 6 operations for each token and
weight.  Attention computes two products forward and five backward on each pair of tokens that its blocks look at, also where one
of the pair is hidden.  The terms of the scans are those of `nn/ssd.py` and `nn/selective.py`.

What all ranks do together is what the single process does, and beside it, by name:

    k, v            where tp has more ranks than key heads, each rank of a run projects its group's keys and values
    B, C, C B'      the same where tp has more ranks than Mamba-2 has groups
    attention       a block is as wide as the widest of its rows: who has other rows together computes other hidden pairs
"""
from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np

from refpar.config import Model, share
from refpar.nn.attention import places
from refpar.nn.blocks import blocks
from refpar.nn.build import build
from refpar.nn.init import TAPS
from refpar.parallel.context import standing
from refpar.parallel.order import way_of
from refpar.plan.activations import Spot, again, core

Work = dict[str, int]           # "mamba2 C B'" -> operations


def work(spot: Spot, batch, dtype, kinds: tuple[str, ...]) -> Work:
    """Forward and backward of one micro-batch on a rank that has layers of these kinds, by kind and term."""
    total = {}
    for kind in dict.fromkeys(kind for kind in kinds if kind != "loss"):
        here = linears(spot, batch, kind) | OTHERS.get(kind, _none)(spot, batch, dtype)
        for term, flops in forward_again(spot, kind, here).items():
            here[term] += flops
        total |= {f"{kind} {term}": flops * kinds.count(kind) for term, flops in here.items()}
    return total


# Of a term's operations, forward and backward, the share that forward has; of linear maps a third.
FORWARD = {"pairs of tokens": Fraction(2, 7), "C B'": Fraction(1, 4), "(C B' o decay) X": Fraction(1, 3),
           "chunk states": Fraction(1, 4), "C h": Fraction(1, 3), "inter-chunk": Fraction(1, 2), "B X": Fraction(0)}


def forward_again(spot: Spot, kind: str, here: Work) -> Work:
    """What recomputation adds: the forward of a layer, or of attention's core."""
    what = again(spot.model, spot.layout, kind)
    terms = {"layer": list(here), "core": ["pairs of tokens"], None: []}[what]
    added = {term: int(here[term] * FORWARD.get(term, Fraction(1, 3))) for term in terms}
    if "B X" in added:                              # Mamba-1's scan may run twice one way and once the other
        added["C h"] = here["C h"] - here["B X"] // 2
    return added


def added(parts: list[Work]) -> Work:
    """The sum of several works."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def linears(spot: Spot, batch, kind: str) -> Work:
    """6 operations for each token and each weight of a matrix that is here."""
    return {name: 6 * spot.rows * spot.inside(kind) * math.prod(spot.held(word) for word in dims.split())
            for name, dims in matrices(spot.model, kind).items()}


@cache
def matrices(model: Model, kind: str) -> dict[str, str]:
    """The parameters of a kind of layer that are matrices of a linear map, and their dims."""
    layer = next(layer for name, layer in build(model).layers if name.endswith(f".{kind}"))
    tables = ("position", *(("table",) if kind == "embedding" else ()))
    return {name: dims for name, dims in layer.dims.items()
            if len(dims.split()) > 1 and name not in (*TAPS, *tables, "A_log")}


# -------------------------------------------------------------------------------------------------------- what is no linear map

def attention(spot: Spot, batch, dtype) -> Work:
    """7 products over the pairs of tokens that the blocks look at."""
    model = spot.model
    if model.cut:
        return {}
    heads = spot.held("H/tp")
    queries, keys, heads = _met(spot, batch, heads)
    looked = sum(math.prod(part.stop - part.start for part in (block.rows, block.queries, block.keys))
                 for some in keys for block in blocks(queries, some, heads, np.dtype(dtype), model.reach))
    return {"pairs of tokens": 7 * 2 * looked * heads * model.head_width}


def _met(spot: Spot, batch, heads: int):
    """(queries, the keys that they meet one set after the other, heads), by the option of attention over cp."""
    way, ranks = way_of(spot.model, spot.layout), spot.layout.cp
    size, queries = ranks if way == "gather" else 1, places(batch)
    if core(spot.layout) == "heads":
        size, _, heads, _ = spot.exchanged()
        queries = standing(way, ranks, size)(batch, spot.cp // size)
    return queries, [standing(way, ranks, size)(batch, group) for group in range(ranks // size)], heads


def mamba1(spot: Spot, batch, dtype) -> Work:
    """Each token reads the state, and backward that and twice the gradient of what enters it."""
    if spot.model.cut:
        return {}
    mine, channels = share(spot.length, spot.layout.cp, spot.cp), spot.held("I/tp")
    if spot.layout.cp_mamba == "heads":
        mine, (_, _, channels) = slice(0, spot.length), spot.by_heads()
    forward, backward = runs(spot, batch, mine)
    state = 2 * spot.rows * (mine.stop - mine.start) * spot.model.state * channels
    return {"C h": (forward + backward) * state, "B X": 2 * backward * state}


def runs(spot: Spot, batch, mine: slice) -> tuple[int, int]:
    """How often Mamba-1's scan runs over the tokens `mine` of a slice, forward and backward: first as if alone, for the summary that
    others need, and again where there is something before them, and behind them."""
    whole, begin = batch.whole.whole or batch.whole, sum(spot.earlier)
    before = spot.rows * (begin + mine.start) > 0
    later = slice(begin + mine.stop, whole.tokens.shape[1])
    goes_on = np.logical_and.accumulate(whole.position[:, later] > 0, axis=1)       # [B, S later]: of the document at the border
    behind = (goes_on & (whole.targets[:, later] >= 0)).any()
    return 1 + int(before), 1 + int(behind)


def mamba2(spot: Spot, batch, dtype) -> Work:
    """Chunk by chunk; the last may be shorter."""
    if spot.model.cut:
        return {}
    rows, columns = spot.rows, spot.inside("mamba2")
    heads, groups = spot.held("M/tp"), spot.held("G/tp")
    if spot.layout.cp_mamba == "heads":
        columns, (heads, groups, _) = spot.length, spot.by_heads()
        groups *= heads > 0                             # a rank without heads has nothing to scan
    lengths = [min(spot.model.chunk, columns - begin) for begin in range(0, columns, spot.model.chunk)]
    squares, chunks = sum(length**2 for length in lengths), len(lengths)
    channels, N = heads * spot.model.ssm_head_width, spot.model.state
    return {"C B'": 4 * 2 * rows * squares * groups * N,
            "(C B' o decay) X": 3 * 2 * rows * squares * channels,
            "chunk states": 4 * 2 * rows * columns * channels * N,
            "C h": 3 * 2 * rows * columns * channels * N,
            "inter-chunk": 2 * 2 * rows * chunks * channels * N}


def _none(*_) -> Work:
    return {}


OTHERS = {"attention": attention, "mamba1": mamba1, "mamba2": mamba2}
