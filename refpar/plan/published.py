"""What backward keeps of one Transformer layer, and what a step computes: published formulas beside ours, the difference named.

Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", sections 4 and 5, count bytes of a GPT layer with
16-bit numbers, s tokens, b rows, width h, a heads, t ranks of tp:

    none            s b h (34 + 5 a s / h)              tp          s b h (10 + 24/t + 5 a s / (h t))
    tp with sp      s b h / t (34 + 5 a s / h)          with selective recomputation    the same without 5 a s / h
    full            2 s b h

With context parallelism s is a rank's own tokens, and the last term has the keys of all: 5 a S / h, S the whole row.

Ours, of the same layer, has

    no 5 a s / h                attention keeps no pairs of tokens: blocks are computed again (`nn/blocks.py`), so selective
                                recomputation saves only what the core makes of them
    2 s b h less                dropout's masks are functions of the index, and not kept
    with sp, 4 s b h (1 - 1/t) more     the gathered input of either half is kept, where theirs is gathered again in backward
    with Ulysses, 2 s b h / t more      what the core makes is kept by heads, as it made it, and by tokens, as the next map takes it
    small terms                 one number a token and head (lse), one or two a token and norm (scale), places of the keys

Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", section 5.1, count the
operations of a step of L layers and v words on all ranks, forward, backward, and with full recomputation forward again:

    none            72 b s L h^2 (1 + s / 6h + v / 12 L h)              full            96 b s L h^2 (1 + s / 6h + v / 16 L h)

Ours has, of pairs of tokens, 7 products where theirs has 6 (and 9 for 8 with full recomputation), because blocks compute the scores
again; and only those pairs that blocks look at, where theirs has all s^2.
"""
from __future__ import annotations

from typing import NamedTuple

from refpar.config import Layout, Model
from refpar.plan.activations import Spot, elements, kept

NUMBER = 2              # bytes of a 16-bit number
SMALL = ("lse", "scale", "document", "position", "index")


class Compared(NamedTuple):
    """Bytes of one layer on one rank: as published, ours by its points, and by the terms above; and the small terms, in elements."""
    published: float
    ours: float
    by_terms: float
    small: int


def compared(model: Model, layout: Layout, tokens: int, rows: int = 1) -> Compared:
    """Attention and MLP of a GPT whose heads are all its own (kv_heads = heads, heads * head_width = width, ffn = 4 width); of the
    first rank of tp and cp, where heads are shared evenly."""
    spot = Spot(model, layout, 0, 0, rows, tokens)
    sbh, a, t = spot.columns * rows * model.width, model.heads, layout.tp
    pairs = 5 * a * tokens / model.width
    if layout.recompute == "full":
        published = 2 * sbh * 2 / (t if layout.sp else 1)               # the inputs of the two halves: one layer here has two
    elif layout.sp:
        published = sbh / t * (34 + pairs)
    else:
        published = sbh * (10 + 24 / t + pairs / t)
    points = [(point, shape, kind) for kind in ("attention", "mlp") for point, shape in kept(model, kind, layout).items()]
    sizes = {(kind, point): elements(spot, kind, shape) for point, shape, kind in points}
    small = sum(size for (_, point), size in sizes.items() if point.endswith(SMALL))
    ours, by_terms = NUMBER * (sum(sizes.values()) - small), published
    if layout.recompute != "full":
        by_terms -= sbh * pairs / t + (2 * sbh / t if layout.sp else 2 * sbh)
        by_terms += 4 * sbh * (1 - 1 / t) if layout.sp else 0
    if layout.recompute == "none" and layout.cp > 1 and layout.cp_attention.startswith("ulysses"):
        by_terms += NUMBER * sbh / t
    selective = layout.recompute == "selective"
    return Compared(published - (sbh * pairs / t if selective else 0), ours, by_terms, small)


def step_flops(model: Model, tokens: int, rows: int, recompute: str = "none") -> float:
    """Operations of a training step of that GPT, as published; tokens of a row.  The head is not computed again."""
    h, layers = model.width, model.blocks
    factor = {"none": 72, "full": 96}[recompute]
    return factor * rows * tokens * layers * h * h * (1 + tokens / (6 * h)) + 6 * rows * tokens * h * model.vocab
