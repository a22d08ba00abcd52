"""A model from its sizes: the chain of named layers, with their seams filled.

Names count over the whole model: "0.embedding", "1.attention", "2.mlp", ..., "9.norm", "10.head".
`fill(name, kind) -> Seams` says what fills a layer's seams; `plain` is the single process, and what any other filling starts from.
"""
from __future__ import annotations

from typing import Callable

from refpar.config import Model
from refpar.nn import blocks
from refpar.nn.chain import Chain
from refpar.nn.dropout import attention_dropout, dropout
from refpar.nn.loss import cross_entropy
from refpar.nn.mamba1 import mamba1_layer
from refpar.nn.mamba2 import mamba2_layer
from refpar.nn.mlp import mlp_layer
from refpar.nn.pieces import norm_of
from refpar.nn.residual import absent, residual
from refpar.nn.seams import Layer, Seams
from refpar.nn.transformer import attention_layer, capped, embedding_layer, head_layer, norm_layer, tied_head_layer

INSIDE = {"attention": attention_layer, "mlp": mlp_layer, "mamba1": mamba1_layer, "mamba2": mamba2_layer}


def plain(config: Model, seed: int = 0) -> Callable[[str, str], Seams]:
    """The fillings of a single process: nothing is sent; dropout is keyed by the layer's name."""
    plan = blocks.remembering()

    def fill(name, kind):
        purpose = "embedding" if kind == "embedding" else "residual"
        return Seams(drop=dropout(config.dropout, seed, purpose, name),
                     core=blocks.core(attention_dropout(config.dropout, seed, name), config.reach, plan))
    return fill


def build(config: Model, seed: int = 0, fill: Callable[[str, str], Seams] | None = None) -> Chain:
    """The model's chain.  `seed` is that of dropout; parameters come from `nn/init.py`."""
    fill = fill or plain(config, seed)
    kinds = ["embedding", *config.pattern * config.blocks, "norm", "head"]
    names = [f"{i}.{kind}" for i, kind in enumerate(kinds)]
    layers = tuple((name, _layer(config, kind, fill(name, kind))) for name, kind in zip(names, kinds))
    ties = {(names[-1], "table"): (names[0], "table")} if config.tied else {}
    return Chain(layers, ties, cross_entropy(config.vocab, config.smoothing, config.z_loss), config)


def _layer(config: Model, kind: str, seams: Seams) -> Layer:
    """One layer of the chain; a mixer or MLP stands on the residual stream."""
    if kind == "embedding":
        return embedding_layer(config, seams)
    if kind == "norm":
        return norm_layer(config, seams)
    if kind == "head":
        head = (tied_head_layer if config.tied else head_layer)(config, seams)
        return capped(head, config.softcap) if config.softcap else head
    if kind == "attention" and config.cut:
        return absent()
    return residual(seams.order(INSIDE[kind](config, seams)), seams, norm_of(config))
