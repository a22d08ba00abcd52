"""What each layer keeps for its backward pass: one table, point by point, and the elements that a rank holds of it.

A point is named as in `saved`; where one array has several names it stands here once, under one of them.  Words of a shape:

    R/s, S+R    tokens of earlier slices of the row; and with them those of this one
    B           rows of the micro-batch             S       tokens of a row that this rank has inside the layers: its cp part
    S/sp        those that it has outside them: a share of S over tp under sequence parallelism, else S
    S+W-1       S, and the inputs of the conv that lie before
    S/u, H/u, K/u   behind Ulysses' exchange: all tokens of the group of ranks, and some of this rank's heads
    R/m, d/L    tokens of whole rows, and their chunks, where Mamba over cp goes by heads; M/m, G/m, I/m: of this rank's heads or channels
    c/16, c/L   chunks of 16, or of L, into which the tokens of a scan are cut
    Q           groups of Mamba-2's norm that are here, whole or in part

Any other word is a dim of the model as parameters have them: "HE/tp" is cut, "D" is whole.
"""
from __future__ import annotations

import math
from collections import Counter
from typing import Callable, NamedTuple

from refpar.config import Layout, Model, shares
from refpar.nn.selective import CHUNK
from refpar.parallel.mamba import reorders
from refpar.parallel.order import columns, way_of
from refpar.parallel.ulysses import group_size, head_parts

NORM = {"norm.x": "B S/sp D", "norm.normed": "B S/sp D", "norm.scale": "B S/sp"}         # x of an RMS norm, normed of a LayerNorm

STATE = ("mamba1", "mamba2")

KEPT: dict[str, dict[str, str]] = {
    "embedding": {"tokens": "B S"},
    "attention": NORM | {
        "inner.into.x": "B S D",
        "inner.q_norm.x": "B S HE/tp", "inner.q_norm.scale": "B S H/tp",
        "inner.k_norm.x": "B S KE/tp", "inner.k_norm.scale": "B S K/tp",
        "inner.out_of.x": "B S HE/tp"},                         # and what its core keeps: CORES
    "mlp": NORM | {
        "inner.into.x": "B S D", "inner.act.gate_up": "2 B S F/tp", "inner.act.x": "B S F/tp", "inner.out_of.x": "B S F/tp"},
    "mamba1": NORM | {
        "inner.into.x": "B S D",
        "inner.conv.conv.padded": "B S+W-1 I/tp", "inner.conv.act.x": "B S I/tp",
        "inner.second.x": "B S I/tp", "inner.dt.x": "B S R", "inner.step.y": "B S I/tp",
        "inner.scan.B": "B S N", "inner.scan.C": "B S N", "inner.scan.starts": "c/16 B N I/tp",     # scan.x is second.x, dt step.y
        "inner.gate.y": "B S I/tp", "inner.gate.gate": "B S I/tp", "inner.gate.act.x": "B S I/tp", "inner.out_of.x": "B S I/tp"},
    "mamba2": NORM | {
        "inner.into.x": "B S D",
        "inner.mix.x.conv.padded": "B S+W-1 MP/tp", "inner.mix.x.act.x": "B S MP/tp",
        "inner.mix.B.conv.padded": "B S+W-1 GN/tp", "inner.mix.B.act.x": "B S GN/tp",
        "inner.mix.C.conv.padded": "B S+W-1 GN/tp", "inner.mix.C.act.x": "B S GN/tp",
        "inner.mix.scan.x": "B S MP/tp", "inner.mix.scan.dt": "B S M/tp",                           # skip.x is scan.x
        "inner.mix.scan.B": "B S GN/tp", "inner.mix.scan.C": "B S GN/tp",
        "inner.mix.scan.log": "B S M/tp", "inner.mix.scan.starts": "c/L B MP/tp N",
        "inner.norm.gate.y": "B S MP/tp", "inner.norm.gate.gate": "B S MP/tp", "inner.norm.gate.act.x": "B S MP/tp",
        "inner.norm.norm.y": "B S MP/tp", "inner.norm.norm.scale": "B S Q", "inner.out_of.x": "B S MP/tp"},
    "norm": {"x": "B S/sp D", "normed": "B S/sp D", "scale": "B S/sp"},
    "head": {"x": "B S D"},
    "loss": {"logits": "B S V/tp", "lse": "B S", "targets": "B S"},             # logits are the soft cap's y too
}


# What the filling of attention's core keeps beside its output, which is out_of.x where heads are not exchanged.
CORES: dict[str, dict[str, str]] = {
    "alone": {"inner.core.q": "B S HE/tp", "inner.core.after.k": "B S+R KE/tp", "inner.core.after.v": "B S+R KE/tp",
              "inner.core.after.document": "B S+R", "inner.core.after.position": "B S+R", "inner.core.after.index": "B S+R",
              "inner.core.lse": "B S H/tp"},
    "tokens": {"inner.core.q": "B S HE/tp", "inner.core.k": "B S+R KE/tp", "inner.core.v": "B S+R KE/tp",
               "inner.core.lse": "B S H/tp"},
    "heads": {"inner.core.q": "B S/u H/u E", "inner.core.k": "B S/u K/u E", "inner.core.v": "B S/u K/u E",
              "inner.core.out": "B S/u H/u E", "inner.core.lse": "B S/u H/u"},
}


# By heads, Mamba-2's mix keeps whole rows of some heads, and so does Mamba-1's scan, of some channels.
BY_HEADS = {"S": "R/m", "S+W-1": "R/m+W-1", "MP/tp": "M/m P", "GN/tp": "G/m N", "M/tp": "M/m", "I/tp": "I/m", "c/L": "d/L",
            "c/16": "d/16"}


def by_heads(kind: str, points: dict[str, str]) -> dict[str, str]:
    """The points of a Mamba layer where cp goes by heads."""
    inner = "inner.mix." if kind == "mamba2" else "inner.scan."
    more = {"inner.scan.x": "B S I/tp", "inner.scan.dt": "B S I/tp"} if kind == "mamba1" else {}
    return {point: " ".join(BY_HEADS.get(word, word) for word in shape.split()) if point.startswith(inner) else shape
            for point, shape in (points | more).items()}


def core(layout: Layout) -> str:
    """Which of them: a core alone, one whose keys travel, or one for which tokens become heads."""
    return "alone" if layout.cp == 1 else "heads" if layout.cp_attention.startswith("ulysses") else "tokens"


class When(NamedTuple):
    """Points that are kept by some models only."""
    kind: str
    point: str                                                  # what the point's name begins with
    holds: Callable[[Model], bool]


SOME: tuple[When, ...] = (
    *(When(kind, "norm.x", lambda model: model.norm == "rms") for kind in ("attention", "mlp", "mamba1", "mamba2")),
    *(When(kind, "norm.normed", lambda model: model.norm == "layer") for kind in ("attention", "mlp", "mamba1", "mamba2")),
    When("norm", "x", lambda model: model.norm == "rms"), When("norm", "normed", lambda model: model.norm == "layer"),
    When("attention", "", lambda model: not model.cut),
    When("attention", "inner.q_norm", lambda model: model.qk_norm),
    When("attention", "inner.k_norm", lambda model: model.qk_norm),
    When("mlp", "inner.act.gate_up", lambda model: model.mlp == "swiglu"),
    When("mlp", "inner.act.x", lambda model: model.mlp != "swiglu"),
    When("mamba1", "inner.conv.act", lambda model: model.conv_act != "none"),
    When("mamba1", "inner.scan.starts", lambda model: not model.cut),
    *(When("mamba2", f"inner.mix.{name}.act", lambda model: model.conv_act != "none") for name in "xBC"),
    When("mamba2", "inner.mix.scan.log", lambda model: not model.cut),
    When("mamba2", "inner.mix.scan.starts", lambda model: not model.cut),
)


def kept(model: Model, kind: str, layout: Layout = Layout()) -> dict[str, str]:
    """The points of a kind of layer in this model, and their shapes."""
    if again(model, layout, kind) == "layer":
        return {"x": "B S/sp D"} | BEFORE.get(kind, {})
    points = KEPT[kind] | (CORES[core(layout)] if kind == "attention" else {})
    if again(model, layout, kind) == "core":
        points = KEPT[kind] | RECOMPUTED_CORE
    if layout.cp_mamba == "heads" and kind in STATE:
        points = by_heads(kind, points)
    return {point: shape for point, shape in points.items()
            if all(when.holds(model) for when in SOME if when.kind == kind and point.startswith(when.point))}


# What lies before the tokens, where a whole layer is computed again; and what attention keeps where its core is.
KEYS_BEFORE = {"before.k": "B R/s KE/tp", "before.v": "B R/s KE/tp", **dict.fromkeys(
    ("before.document", "before.position", "before.index"), "B R/s")}
BEFORE = {"attention": KEYS_BEFORE, "mamba1": {"before.conv": "B W-1 I/tp", "before.state": "B N I/tp"},
          "mamba2": {"before.conv_x": "B W-1 MP/tp", "before.conv_B": "B W-1 GN/tp", "before.conv_C": "B W-1 GN/tp",
                     "before.state": "B MP/tp N"}}
RECOMPUTED_CORE = {"inner.core.q": "B S HE/tp", "inner.core.k": "B S KE/tp", "inner.core.v": "B S KE/tp",
                   "inner.out_of.x": "B S HE/tp", **{f"inner.core.{point}": shape for point, shape in KEYS_BEFORE.items()}}


def again(model: Model, layout: Layout, kind: str) -> str | None:
    """What of a layer of this kind backward computes again: the layer, its core, or nothing."""
    if layout.computes_again(kind) and kind in model.pattern:
        return "layer"
    return "core" if layout.recompute == "selective" and kind == "attention" and not model.cut else None


def kinds(model: Model) -> list[str]:
    """The kinds of all layers, and the loss."""
    return ["embedding", *model.pattern * model.blocks, "norm", "head", "loss"]


class Spot(NamedTuple):
    """A rank, and one of its micro-batches: so many rows of `length` tokens, of which it has its part."""
    model: Model
    layout: Layout
    tp: int
    cp: int
    rows: int
    length: int
    earlier: tuple[int, ...] = ()       # lengths of the whole rows' slices that came before

    def tokens(self, cp: int) -> int:
        """Of a row, on a rank of cp."""
        return self._columns(self.length, cp)

    @property
    def past(self) -> int:
        """Tokens of a row in earlier slices, here."""
        return sum(self._columns(length, self.cp) for length in self.earlier)

    def _columns(self, length: int, cp: int) -> int:
        return len(columns(way_of(self.model, self.layout), length, self.layout.cp, cp))

    @property
    def columns(self) -> int:
        return self.tokens(self.cp)

    def held(self, word: str) -> int:
        """The length of a dim here."""
        part = self.model.part(word, self.layout.tp, self.tp) if word.endswith("/tp") else slice(0, self.model.dim(word)[0])
        return part.stop - part.start

    def inside(self, kind: str) -> int:
        """Tokens of a row inside a layer of the kind: a scan and a conv may want another order than the stream's."""
        moved = kind in STATE and reorders(kind, self.layout.cp_mamba, way_of(self.model, self.layout))
        return shares(self.length, self.layout.cp)[self.cp] if moved else self.columns

    def by_heads(self) -> tuple[int, int, int]:
        """Mamba-2's heads and groups, and Mamba-1's channels, of this rank where its tp group's are cut over cp."""
        heads, groups = head_parts(self.held("M/tp"), self.held("G/tp"), self.layout.cp)[self.cp]
        return heads.stop - heads.start, groups.stop - groups.start, shares(self.held("I/tp"), self.layout.cp)[self.cp]

    @property
    def outside(self) -> int:
        """Tokens of a row outside the layers."""
        return shares(self.columns, self.layout.tp)[self.tp] if self.layout.sp else self.columns

    @property
    def norm_groups(self) -> int:
        """Groups of Mamba-2's norm that are here, whole or in part."""
        mine = self.model.part("MP", self.layout.tp, self.tp)
        return len(groups_of([mine], self.model.norm_width)) if mine.stop > mine.start else 0

    def exchanged(self) -> Exchange:
        """What Ulysses makes of this rank's tokens and heads."""
        heads, keys, ranks = self.held("H/tp"), self.held("K/tp"), self.layout.cp
        size = ranks if self.layout.cp_attention == "ulysses" else group_size(ranks, keys)
        first = self.cp // size * size
        some = [part.stop - part.start for part in head_parts(heads, keys, size)[self.cp - first]]
        return Exchange(size, sum(self.tokens(rank) for rank in range(first, first + size)), *some)


class Exchange(NamedTuple):
    """Ranks that exchange heads; their tokens of a row; the query and key heads that one of them gets."""
    size: int
    tokens: int
    heads: int
    kv_heads: int


def groups_of(cuts: list[slice], width: int) -> range:
    """The groups of `width` channels that neighbouring cuts have a part of."""
    return range(cuts[0].start // width, -(-cuts[len(cuts) - 1].stop // width))


def saved_elements(spot: Spot) -> int:
    """Elements that backward keeps on a rank, for one micro-batch."""
    return sum(kept_elements(spot, kind) * count for kind, count in Counter(kinds(spot.model)).items())


def kept_elements(spot: Spot, kind: str) -> int:
    """Those of one layer."""
    return sum(elements(spot, kind, shape) for shape in kept(spot.model, kind, spot.layout).values())


def elements(spot: Spot, kind: str, shape: str) -> int:
    """How many elements an array of this shape has there, in a layer of the kind."""
    here, rows, taps, chunk = spot.inside(kind), spot.length, spot.model.conv - 1, spot.model.chunk
    sizes = {"B": spot.rows, "S": here, "S/sp": spot.outside, "S+W-1": here + taps, "W-1": taps, "R/s": spot.past, "S+R": here + spot.past,
             "c/16": -(-here // CHUNK), "c/L": -(-here // chunk),
             "Q": spot.norm_groups, "R/m": rows, "R/m+W-1": rows + taps, "d/16": -(-rows // CHUNK), "d/L": -(-rows // chunk)}
    words = shape.split()
    if "S/u" in words:
        _, sizes["S/u"], sizes["H/u"], sizes["K/u"] = spot.exchanged()
    if {"M/m", "G/m", "I/m"} & set(words):
        sizes["M/m"], sizes["G/m"], sizes["I/m"] = spot.by_heads()
    return math.prod(sizes[word] if word in sizes else spot.held(word) for word in words)
