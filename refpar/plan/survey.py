"""What the survey's tables say that a layer moves, as printed and as counted (arXiv:2602.09109, tables 3 and 8, section 5.2).

Each row has the survey's figure, the corrections that lead from it to ours, one after the other and by name, and ours.  A figure is
in elements, for each of N ranks and forward; where ranks differ, the mean, which is exact for uneven sizes too.  What one rank sends
is told by `layer_sends`, from the formulas of `plan/traffic.py`: they know what is uneven, and which algorithm runs.

    long arrays     both agree to the byte, summed over ranks
    short arrays    an all_reduce of at most 64 KiB goes by doubling (`comm/choose.py`): fewer messages, and log2 N times its bytes
                    from each rank in place of 2(N-1)/N.  `layer_sends` says so, the figure does not

Table 2, of the collectives themselves, is `plan/volume.py`'s SURVEY; the FLOPs of section 5 are in `plan/survey_work.py`.

Letters: b rows, s tokens, d width, a query heads, k key heads, e their width, f the MLP's width, j its matrices; of Mamba-2: m
heads of width p, state n, g groups, w taps, l tokens a chunk; u bytes of a number; h ranks that exchange heads, where N/h such
groups stand on a ring.
"""
from __future__ import annotations

import math
from typing import Callable, NamedTuple

import numpy as np

from refpar.config import Layout, Model
from refpar.nn.build import build
from refpar.parallel.ulysses import group_size
from refpar.plan import traffic
from refpar.plan.volume_state import COUNT


class Sizes(NamedTuple):
    """Of one layer and its tokens."""
    b: int
    s: int
    d: int
    a: int
    k: int
    e: int
    f: int
    j: int
    m: int
    p: int
    n: int
    g: int
    w: int
    l: int
    u: int

    @classmethod
    def of(cls, model: Model, rows: int, length: int, itemsize: int = 8) -> Sizes:
        """Those of a model."""
        return cls(rows, length, model.width, model.heads, model.kv_heads, model.head_width, model.ffn,
                   3 if model.mlp == "swiglu" else 2, model.ssm_heads, model.ssm_head_width, model.state, model.groups, model.conv,
                   model.chunk, itemsize)

    @property
    def summary(self) -> float:
        """What a cp rank hands on for Mamba-2: decay and state of each head, three tails of the conv, and how long these are."""
        return self.b * (self.m * (1 + self.p * self.n) + (self.w - 1) * self.channels + 3 * COUNT / self.u)

    @property
    def channels(self) -> int:
        """Of Mamba-2's conv."""
        return self.m * self.p + 2 * self.g * self.n


Formula = Callable[[Sizes, int], float]         # (sizes, N) -> elements


class Step(NamedTuple):
    """One correction: why, and what the figure becomes by it; to(figure, sizes, N)."""
    why: str
    to: Callable[[float, Sizes, int], float]


class Row(NamedTuple):
    """One strategy for one kind of layer.  table: of the survey, or "" where it has no such row.  layout(N) is what runs it."""
    table: str
    kind: str
    strategy: str
    layout: Callable[[int], Layout]
    printed: str
    figure: Formula
    steps: tuple[Step, ...]
    ours: str
    value: Formula
    backward: Formula
    upward: str = "as much"         # the same in words, beside forward


def corrected(row: Row, z: Sizes, N: int) -> float:
    """The survey's figure after all corrections."""
    figure = row.figure(z, N)
    for step in row.steps:
        figure = step.to(figure, z, N)
    return figure


def layer_sends(kind: str, model: Model, layout: Layout, rank: int, rows: int, length: int, dtype) -> tuple[int, int]:
    """(forward, backward): BYTES that one rank sends for a layer, for any sizes, by the algorithms that run.  rows: the rank's;
    length: of whole rows."""
    here = traffic.Here(model, traffic.mesh_of(layout, rank), rows, length, np.dtype(dtype))
    told = traffic.LAYERS[kind](here)
    return sum(one.bytes for one in told if one.forward), sum(one.bytes for one in told if not one.forward)


def gradients(model: Model, kind: str, N: int) -> float:
    """What a rank sends once a step where N ranks hold the whole layer, dp or cp: its parameters' gradients, summed in long arrays."""
    dims = next(layer for name, layer in build(model).layers if name.endswith(f".{kind}")).dims
    return 2 * (N - 1) / N * sum(math.prod(model.shape(text)) for text in dims.values())


# ------------------------------------------------------------------------------------------------------------------ the formulas

def stream(z: Sizes, N: int) -> float:
    """An all_reduce of the residual stream, or an all_gather and a reduce_scatter."""
    return 2 * (N - 1) / N * z.b * z.s * z.d


def keys(z: Sizes, N: int) -> float:
    """Keys and values, to everybody else."""
    return 2 * (N - 1) / N * z.b * z.s * z.k * z.e


def heads(z: Sizes, N: int) -> float:
    """q, k and v to where their heads are, and out back.  A key head goes to every rank that has queries for it."""
    return 2 * (N - 1) / N**2 * z.b * z.s * z.e * (z.a + max(z.k, N))


def near(z: Sizes, N: int) -> float:
    """The same in groups of ranks that exchange heads."""
    size = group_size(N, z.k)
    return 2 * (size - 1) / size * z.b * z.s / N * z.e * (z.a + z.k)


def across(z: Sizes, N: int) -> float:
    """The keys of some heads around a ring of such groups."""
    size = group_size(N, z.k)
    return 2 * (1 - size / N) * z.b * z.s * z.k / size * z.e


def norm_statistic(z: Sizes, N: int) -> float:
    """Of Mamba-2's norm, a number for each token and group: summed over the ranks that share the group."""
    return 2 * max(N - z.g, 0) / N * z.b * z.s


def none(z: Sizes, N: int) -> float:
    """Nothing."""
    return 0


def twice(formula: Formula) -> Formula:
    """Keys travel again, and their gradients home."""
    return lambda z, N: 2 * formula(z, N)


def rounds(N: int) -> int:
    """Messages of all N ranks in a prefix scan by doubling: ceil(log2(N-i)) of rank i."""
    return sum(after.bit_length() for after in range(N))


RECEIVED = Step("it counts what is received, too", lambda figure, z, N: figure / 2)
ROWS_TOO = Step("b is left out", lambda figure, z, N: figure * z.b)
OWN_PART = Step("the own part does not travel", lambda figure, z, N: figure * (N - 1) / N)
WIDTH = Step("a e is the heads' width, and what moves is the stream's", lambda figure, z, N: figure * z.d / (z.a * z.e))
REPEATED = Step("where k < N a key head goes to each rank of its run",
                lambda figure, z, N: figure * (z.a + max(z.k, N)) / (z.a + z.k))
STATISTIC = Step("where g < N ranks share a group of the norm, and its statistic",
                 lambda figure, z, N: figure + norm_statistic(z, N))


def tp(N: int) -> Layout:
    """Heads and features are cut."""
    return Layout(tp=N)


def tpsp(N: int) -> Layout:
    """And tokens outside the layers."""
    return Layout(tp=N, sp=True)


def cp(**ways) -> Callable[[int], Layout]:
    """Tokens are cut, and this is how layers meet the others."""
    return lambda N: Layout(cp=N, **ways)


def dp(N: int) -> Layout:
    """Rows are cut."""
    return Layout(dp=N)


# --------------------------------------------------------------------------------------------------------------------- the tables

TWICE, STREAM, KEYS = "twice as much", "2(N-1)/N b s d", "2(N-1)/N b s k e"

ROWS: tuple[Row, ...] = (
    Row("3", "attention", "DP", dp, "0", none, (), "0", none, none, "gradients, once a step"),
    Row("3", "attention", "TP", tp, "4(N-1)/N b s d", lambda z, N: 4 * (N - 1) / N * z.b * z.s * z.d, (RECEIVED,),
        STREAM, stream, stream),
    Row("3", "attention", "TPSP", tpsp, "4(N-1)/N b s d", lambda z, N: 4 * (N - 1) / N * z.b * z.s * z.d, (RECEIVED,),
        STREAM, stream, stream),
    Row("3", "attention", "CP, ring", cp(), "4(N-1)/N b s k e", lambda z, N: 4 * (N - 1) / N * z.b * z.s * z.k * z.e, (RECEIVED,),
        KEYS, keys, twice(keys), TWICE),
    Row("", "attention", "CP, gather", cp(cp_attention="gather"), "", none, (), KEYS, keys, twice(keys), TWICE),
    Row("3", "attention", "TPUP (Ulysses)", cp(cp_attention="ulysses"), "4(N-1)/N^2 b s e (a+k)",
        lambda z, N: 4 * (N - 1) / N**2 * z.b * z.s * z.e * (z.a + z.k), (RECEIVED, REPEATED),
        "2(N-1)/N^2 b s e (a+max(k,N))", heads, heads),
    Row("", "attention", "Ulysses and ring", cp(cp_attention="ulysses+ring"), "", none, (),
        "2/(h N) b s e ((h-1)(a+k) + (N-h) k)", lambda z, N: near(z, N) + across(z, N),
        lambda z, N: near(z, N) + 2 * across(z, N), "the ring's part twice"),
    Row("5.2", "attention", "TP", tp, "2 s a e", lambda z, N: 2 * z.s * z.a * z.e, (ROWS_TOO, OWN_PART, WIDTH),
        STREAM, stream, stream),
    Row("5.2", "attention", "CP, ring", cp(), "2 s k e", lambda z, N: 2 * z.s * z.k * z.e, (ROWS_TOO, OWN_PART),
        KEYS, keys, twice(keys), TWICE),
    Row("5.2", "mlp", "TP", tp, "2 s a e", lambda z, N: 2 * z.s * z.a * z.e, (ROWS_TOO, OWN_PART, WIDTH),
        STREAM, stream, stream),
    Row("8", "mamba2", "DP", dp, "0", none, (), "0", none, none, "gradients, once a step"),
    Row("", "mamba2", "TP", tp, "", none, (), f"{STREAM} + norm", lambda z, N: stream(z, N) + norm_statistic(z, N),
        lambda z, N: stream(z, N) + norm_statistic(z, N)),
    Row("8", "mamba2", "TPSP", tpsp, "O(d n s)", lambda z, N: z.d * z.n * z.s,
        (Step("the state n is not in it", lambda figure, z, N: figure / z.n), ROWS_TOO,
         Step("an all_gather and a reduce_scatter, not an all_reduce: 2", lambda figure, z, N: figure * 2), OWN_PART, STATISTIC),
        f"{STREAM} + norm", lambda z, N: stream(z, N) + norm_statistic(z, N), lambda z, N: stream(z, N) + norm_statistic(z, N)),
    Row("8", "mamba2", "CP, gather", cp(), "O(d n N)", lambda z, N: z.d * z.n * N,
        (Step("the state has m p channels, some 2 d", lambda figure, z, N: figure * z.m * z.p / z.d), ROWS_TOO, OWN_PART,
         Step("a decay for each head", lambda figure, z, N: figure + (N - 1) * z.b * z.m),
         Step("the last w-1 inputs of the conv", lambda figure, z, N: figure + (N - 1) * z.b * (z.w - 1) * z.channels),
         Step("how many tokens each tail has", lambda figure, z, N: figure + (N - 1) * z.b * 3 * COUNT / z.u)),
        "(N-1) z", lambda z, N: (N - 1) * z.summary, lambda z, N: (N - 1) * z.summary),
    Row("", "mamba2", "CP, chain", cp(cp_mamba="chain"), "", none, (), "2(N-1)/N z", lambda z, N: 2 * (N - 1) / N * z.summary,
        lambda z, N: 2 * (N - 1) / N * z.summary),
    Row("", "mamba2", "CP, scan", cp(cp_mamba="scan"), "", none, (), "log2 N z, for N a power of 2",
        lambda z, N: (rounds(N) + N - 1) / N * z.summary, lambda z, N: (rounds(N) + N - 1) / N * z.summary),
    Row("", "mamba2", "CP, heads", cp(cp_mamba="heads"), "", none, (), "(N-1)/N^2 b s (2 m p + m + 2 n max(g,N))",
        lambda z, N: (N - 1) / N**2 * z.b * z.s * (2 * z.m * z.p + z.m + 2 * z.n * max(z.g, N)),
        lambda z, N: (N - 1) / N**2 * z.b * z.s * (2 * z.m * z.p + z.m + 2 * z.n * max(z.g, N))),
)
