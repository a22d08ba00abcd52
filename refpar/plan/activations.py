"""What each layer keeps for its backward pass: one table, point by point, and the elements that a rank holds of it.

A point is named as in `saved`; where one array has several names it stands here once, under one of them.  Words of a shape:

    B           rows of the micro-batch             S       tokens of a row that this rank has inside the layers: its cp part
    S/sp        those that it has outside them: a share of S over tp under sequence parallelism, else S
    S+W-1       S, and the inputs of the conv that lie before
    c/16, c/L   chunks of 16, or of L, into which S tokens are cut
    Q           groups of Mamba-2's norm that are here, whole or in part

Any other word is a dim of the model as parameters have them: "HE/tp" is cut, "D" is whole.
"""
from __future__ import annotations

import math
from typing import Callable, NamedTuple

from refpar.config import Layout, Model, share
from refpar.nn.selective import CHUNK

NORM = {"norm.x": "B S/sp D", "norm.normed": "B S/sp D", "norm.scale": "B S/sp"}         # x of an RMS norm, normed of a LayerNorm

KEPT: dict[str, dict[str, str]] = {
    "embedding": {"tokens": "B S"},
    "attention": NORM | {
        "inner.into.x": "B S D",
        "inner.q_norm.x": "B S HE/tp", "inner.q_norm.scale": "B S H/tp",
        "inner.k_norm.x": "B S KE/tp", "inner.k_norm.scale": "B S K/tp",
        "inner.core.q": "B S HE/tp", "inner.core.after.k": "B S KE/tp", "inner.core.after.v": "B S KE/tp",
        "inner.core.after.document": "B S", "inner.core.after.position": "B S", "inner.core.after.index": "B S",
        "inner.core.out": "B S HE/tp", "inner.core.lse": "B S H/tp"},           # out is out_of.x too
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


def kept(model: Model, kind: str) -> dict[str, str]:
    """The points of a kind of layer in this model, and their shapes."""
    return {point: shape for point, shape in KEPT[kind].items()
            if all(when.holds(model) for when in SOME if when.kind == kind and point.startswith(when.point))}


def kinds(model: Model) -> list[str]:
    """The kinds of all layers, and the loss."""
    return ["embedding", *model.pattern * model.blocks, "norm", "head", "loss"]


def saved_elements(model: Model, layout: Layout, tp: int, rows: int, columns: int) -> int:
    """Elements that backward keeps on a rank with index `tp`, for one micro-batch of [rows, columns] tokens of its own."""
    return sum(elements(model, layout, tp, rows, columns, shape) for kind in kinds(model) for shape in kept(model, kind).values())


def elements(model: Model, layout: Layout, tp: int, rows: int, columns: int, shape: str) -> int:
    """How many elements an array of this shape has there."""
    outside = share(columns, layout.tp, tp) if layout.sp else slice(0, columns)
    sizes = {"B": rows, "S": columns, "S/sp": outside.stop - outside.start, "S+W-1": columns + model.conv - 1,
             "c/16": -(-columns // CHUNK), "c/L": -(-columns // model.chunk), "Q": norm_groups(model, layout, tp)}
    return math.prod(sizes[word] if word in sizes else held(model, layout, tp, word) for word in shape.split())


def norm_groups(model: Model, layout: Layout, tp: int) -> int:
    """Groups of Mamba-2's norm that are here, whole or in part."""
    mine = model.part("MP", layout.tp, tp)
    return len(groups_of([mine], model.norm_width)) if mine.stop > mine.start else 0


def groups_of(cuts: list[slice], width: int) -> range:
    """The groups of `width` channels that neighbouring cuts have a part of."""
    return range(cuts[0].start // width, -(-cuts[len(cuts) - 1].stop // width))


def held(model: Model, layout: Layout, tp: int, word: str) -> int:
    """The length of a dim on a rank."""
    part = model.part(word, layout.tp, tp) if word.endswith("/tp") else slice(0, model.dim(word)[0])
    return part.stop - part.start
