"""The FLOPs of the survey's section 5, forward, as printed and as counted (arXiv:2602.09109).

Printed are totals, of which each of N devices is said to have 1/N, whichever way the work is cut.  Each term here has the printed
figure, the corrections that lead from it to ours, by name, and the ops under which it is counted.  Ours is the sum of all ranks:

    counted             matrix products, 2mnk each; so neither the softmax (5 b s^2 a), nor the MLP's activation, conv, norms
    a causal mask       keys behind a block's last query are not touched; of the blocks on the diagonal half is computed and hidden
    C B'                once a group, where the survey's einsum repeats B and C for each head
    repeated            where tp has more ranks than key heads, or groups, each rank of a run projects its own copy
    chunks              a shard of cp begins its own, and its last one is shorter

Two lines of the survey are slips: per device it prints 4 b s k e / N for keys and values, without the factor d of its total; and it
takes backward as twice forward, which holds for linear maps alone (`Term.backward`: scores are computed again).

A rank's own share is 1/N of it in the mean only: of a causal row in contiguous shards the last rank has nearly twice as much.
`plan/flops.py` has each rank's own, for any batch.
"""
from __future__ import annotations

from fractions import Fraction
from typing import Callable, NamedTuple

from refpar.config import Layout, shares
from refpar.nn.blocks import block_size
from refpar.plan.survey import Sizes


class Cut(NamedTuple):
    """How the work is cut: "dp", "tp", "cp" or, of heads, "ulysses" and "heads"; and over how many ranks."""
    way: str = "dp"
    ranks: int = 1

    @property
    def layout(self) -> Layout:
        """What runs it."""
        if self.way in ("ulysses", "heads"):
            return Layout(cp=self.ranks, cp_attention="ulysses", cp_mamba="heads")
        return Layout(**{self.way: self.ranks})

    def tokens(self, s: int) -> list[int]:
        """Those of a row on each rank, where they are cut; else all."""
        return shares(s, self.ranks) if self.way == "cp" else [s]

    def copies(self, groups: int) -> int:
        """Ranks' groups together: more than there are, where heads are cut finer."""
        return max(groups, self.ranks) if self.way in ("tp", "heads") else groups


class Step(NamedTuple):
    """One correction: why, and what the figure becomes by it."""
    why: str
    to: Callable[[float, Sizes, Cut], float]


class Term(NamedTuple):
    """A term of section 5.  ops: the names under which it is counted; backward: operations for one forward."""
    kind: str
    name: str
    printed: str
    figure: Callable[[Sizes], float]
    steps: tuple[Step, ...]
    ops: tuple[str, ...]
    backward: Fraction = Fraction(2)


def corrected(term: Term, z: Sizes, cut: Cut) -> float:
    """Of all ranks together, after all corrections."""
    figure = term.figure(z)
    for step in term.steps:
        figure = step.to(figure, z, cut)
    return figure


# ------------------------------------------------------------------------------------------------------------- what is looked at

def hidden(z: Sizes, cut: Cut) -> int:
    """Pairs of tokens of a row that are computed and hidden: half of each block on the diagonal."""
    pairs = 0
    for tokens in cut.tokens(z.s):
        size = block_size(tokens)
        pairs += sum(queries * (queries - 1) // 2 for queries in pieces(tokens, size))
    return pairs


def pieces(tokens: int, size: int) -> list[int]:
    """Lengths of the blocks or chunks of so many tokens; the last may be shorter."""
    return [min(size, tokens - first) for first in range(0, tokens, size)]


def chunks(z: Sizes, cut: Cut) -> list[int]:
    """Their lengths, on all ranks, in one row."""
    return [length for tokens in cut.tokens(z.s) for length in pieces(tokens, z.l)]


def squares(figure: float, z: Sizes, cut: Cut) -> float:
    """Chunks of l tokens -> chunks as they are."""
    return figure * sum(length**2 for length in chunks(z, cut)) / (z.s * z.l)


NO_PRODUCT = Step("elementwise, no matrix product", lambda figure, z, cut: 0)
GELU = Step("no gate, where the MLP is a GELU's", lambda figure, z, cut: figure * z.j / 3)
HEADS = Step("a e for d, where heads are not as wide", lambda figure, z, cut: figure * z.a * z.e / z.d)
KEY_HEADS = Step("where k < N each rank of a run projects its key head", lambda figure, z, cut: figure * cut.copies(z.k) / z.k)
SEEN = Step("keys that are later are not touched", lambda figure, z, cut: figure * (z.s + 1) / (2 * z.s))
MASKED = Step("of a block on the diagonal half is computed and hidden",
              lambda figure, z, cut: figure + 4 * z.b * z.a * z.e * hidden(z, cut))
PROJECTED = Step("where g < N each rank of a run projects its group's B and C",
                 lambda figure, z, cut: figure + 4 * z.b * z.s * z.d * z.n * ((cut.copies(z.g) if cut.way == "tp" else z.g) - z.g))
A_GROUP = Step("once a group, not a head", lambda figure, z, cut: figure * z.g / z.m)
COPIES = Step("where g < N in each rank of a run", lambda figure, z, cut: figure * cut.copies(z.g) / z.g)
SHORTER = Step("the last chunk of a shard is shorter", squares)
CHUNKS = Step("as many chunks as there are", lambda figure, z, cut: figure * len(chunks(z, cut)) * z.l / z.s)

LINEAR = ("linear",)

TERMS: tuple[Term, ...] = (
    Term("attention", "Q", "2 b s d^2", lambda z: 2 * z.b * z.s * z.d**2, (HEADS,), LINEAR),
    Term("attention", "K, V", "4 b s k e d", lambda z: 4 * z.b * z.s * z.k * z.e * z.d, (KEY_HEADS,), LINEAR),
    Term("attention", "Q K', S V", "4 b s^2 d", lambda z: 4 * z.b * z.s**2 * z.d, (HEADS, SEEN, MASKED),
         ("attention scores", "attention values"), Fraction(5, 2)),
    Term("attention", "softmax", "5 b s^2 a", lambda z: 5 * z.b * z.s**2 * z.a, (NO_PRODUCT,), ()),
    Term("attention", "O", "2 b s d^2", lambda z: 2 * z.b * z.s * z.d**2, (HEADS,), LINEAR),
    Term("mlp", "gate, up, down", "6 b s d f", lambda z: 6 * z.b * z.s * z.d * z.f, (GELU,), LINEAR),
    Term("mlp", "SwiGLU", "5 b s f", lambda z: 5 * z.b * z.s * z.f, (NO_PRODUCT,), ()),
    Term("mamba2", "in-projection", "2 b s d (2 m p + 2 g n + m)",
         lambda z: 2 * z.b * z.s * z.d * (2 * z.m * z.p + 2 * z.g * z.n + z.m), (PROJECTED,), LINEAR),
    Term("mamba2", "C B'", "2 b (s/l) m l^2 n", lambda z: 2 * z.b * z.s * z.l * z.m * z.n,
         (A_GROUP, COPIES, SHORTER), ("C B'",), Fraction(3)),
    Term("mamba2", "(C B' o decay) X", "2 b (s/l) m l^2 p", lambda z: 2 * z.b * z.s * z.l * z.m * z.p, (SHORTER,),
         ("(C B' o decay) X",)),
    Term("mamba2", "chunk states", "2 b (s/l) m l p n", lambda z: 2 * z.b * z.s * z.m * z.p * z.n, (), ("chunk states",),
         Fraction(3)),
    Term("mamba2", "inter-chunk", "2 b (s/l) m p n", lambda z: 2 * z.b * z.s / z.l * z.m * z.p * z.n, (CHUNKS,),
         ("inter-chunk",), Fraction(1)),
    Term("mamba2", "C h", "2 b (s/l) m p n l", lambda z: 2 * z.b * z.s * z.m * z.p * z.n, (), ("C h",)),
    Term("mamba2", "out-projection", "2 b s m p d", lambda z: 2 * z.b * z.s * z.m * z.p * z.d, (), LINEAR),
)


def by_ops(kind: str, z: Sizes, cut: Cut, backward: bool = False) -> dict[tuple[str, ...], Fraction]:
    """Ops -> operations of all ranks together, forward or backward; a linear map's ops are all one."""
    total: dict[tuple[str, ...], float] = {}
    for term in TERMS:
        if term.kind == kind and term.ops:
            total[term.ops] = total.get(term.ops, 0) + corrected(term, z, cut) * (term.backward if backward else 1)
    return total
