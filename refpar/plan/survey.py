"""What the survey's tables say that ranks move, as printed and as counted here (arXiv:2602.09109, tables 2, 3 and 8).

A row gives the elements that all N ranks together *send*; a rank's share of it is 1/N where sizes are even, and the sum is exact where
they are not.  Printed figures differ from it in known ways, named in the row:

    table 2     the size that is meant is that of the gathered array (all_gather), of the whole input (reduce_scatter, all_to_all,
                all_reduce): the text's "size before the operation" would give all_gather N times as much
    table 3     sends and receives are both counted: twice what is sent; b is left out in the pieces of Ulysses
    table 8     orders only: TPSP has a factor d_state too many, and names an all_reduce; what moves is one all_gather and one
                reduce_scatter of b s d

Letters: b rows, s tokens, d width, a query heads, k key heads, e their width; of Mamba-2: m heads of width p, state n, g groups, w taps.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

from refpar.config import Layout, Model
from refpar.plan.volume_state import COUNT


class Sizes(NamedTuple):
    """Of one layer and its tokens."""
    b: int
    s: int
    d: int
    a: int
    k: int
    e: int
    m: int
    p: int
    n: int
    g: int
    w: int

    @classmethod
    def of(cls, model: Model, rows: int, length: int) -> Sizes:
        """Those of a model."""
        return cls(rows, length, model.width, model.heads, model.kv_heads, model.head_width, model.ssm_heads, model.ssm_head_width,
                   model.state, model.groups, model.conv)


class Row(NamedTuple):
    """One strategy: as printed, per rank; as we have it, per rank and sent only; of all N ranks, exactly; backward, as often as forward.
    `layout(N)` is what runs it, `kind` the layer."""
    table: str
    strategy: str
    printed: str
    ours: str
    sent: Callable[[Sizes, int], float]
    backward: int
    kind: str
    layout: Callable[[int], Layout]


def summaries(z: Sizes, itemsize: int = 8) -> float:
    """What a rank of cp hands on for Mamba-2, in elements: decay and state of each head, three tails of the conv, and their counts."""
    return z.b * (z.m * (1 + z.p * z.n) + (z.w - 1) * (z.m * z.p + 2 * z.g * z.n)) + 3 * z.b * COUNT / itemsize


ROWS: tuple[Row, ...] = (
    Row("3", "DP", "0", "0", lambda z, N: 0, 1, "attention", lambda N: Layout(dp=N)),
    Row("3", "TP", "4(N-1)/N b s d", "2(N-1)/N b s d", lambda z, N: 2 * (N - 1) * z.b * z.s * z.d, 1, "attention",
        lambda N: Layout(tp=N)),
    Row("3", "TPSP", "4(N-1)/N b s d", "2(N-1)/N b s d", lambda z, N: 2 * (N - 1) * z.b * z.s * z.d, 1, "attention",
        lambda N: Layout(tp=N, sp=True)),
    Row("3", "CP", "4(N-1)/N b s k e", "2(N-1)/N b s k e", lambda z, N: 2 * (N - 1) * z.b * z.s * z.k * z.e, 2, "attention",
        lambda N: Layout(cp=N)),
    Row("3", "CP, gathered", "", "2(N-1)/N b s k e", lambda z, N: 2 * (N - 1) * z.b * z.s * z.k * z.e, 2, "attention",
        lambda N: Layout(cp=N, cp_attention="gather")),
    Row("3", "TPUP (Ulysses)", "4(N-1)/N^2 b s e (a+k)", "2(N-1)/N^2 b s e (a+k)",
        lambda z, N: 2 * (N - 1) / N * z.b * z.s * z.e * (z.a + z.k), 1, "attention", lambda N: Layout(cp=N, cp_attention="ulysses")),
    Row("8", "DP", "0", "0", lambda z, N: 0, 1, "mamba2", lambda N: Layout(dp=N)),
    Row("8", "TPSP", "O(d n s)", "2(N-1)/N b s d", lambda z, N: 2 * (N - 1) * z.b * z.s * z.d, 1, "mamba2",
        lambda N: Layout(tp=N, sp=True)),
    Row("8", "CP", "O(d n N)", "(N-1) b m (p n + 1), and tails", lambda z, N: N * (N - 1) * summaries(z), 1, "mamba2",
        lambda N: Layout(cp=N)),
)

# Table 2: the operation -> (as printed, the elements that all N ranks send of an array of T).
COLLECTIVES: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "reduce": ("(N-1) T at the root", lambda T, N: (N - 1) * T),
    "all_gather": ("(N-1) T/N", lambda T, N: (N - 1) * T),
    "reduce_scatter": ("(N-1) T/N", lambda T, N: (N - 1) * T),
    "all_to_all": ("(N-1) T/N", lambda T, N: (N - 1) * T // N),
    "all_reduce": ("2(N-1) T/N", lambda T, N: 2 * (N - 1) * T),
}
