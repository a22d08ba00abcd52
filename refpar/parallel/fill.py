"""Fills the seams of every layer for a rank of a mesh: the one place where a layer meets its axes.

`model` is `nn.build.build` with these fillings.  What a rank of a mesh of size 1 gets is the single process, by the same path.
"""
from __future__ import annotations

from typing import Callable

from refpar.comm.pairs import over
from refpar.config import Model
from refpar.nn import blocks
from refpar.nn.build import build
from refpar.nn.chain import Chain
from refpar.nn.dropout import attention_dropout, dropout
from refpar.nn.recompute import recomputed, recomputed_core
from refpar.nn.seams import KEEP, Pair, Seams
from refpar.parallel.overlap import overlapped
from refpar.parallel.tensor import norm_groups, sequence, share_of_tokens, tensor
from refpar.parallel.ulysses import context_core
from refpar.parallel.vocabulary import cross_entropy


def model(config: Model, mesh, seed: int = 0, around: Callable = lambda fill: fill) -> Chain:
    """The model's chain as this rank of the mesh runs it.  `seed` is that of dropout; `around(fill) -> fill` may watch the seams."""
    chain = build(config, seed, around(sharded(config, mesh, seed)))._replace(loss=cross_entropy(config, mesh.axis("tp")))
    if mesh.layout.recompute == "full":
        again = [(name, recomputed(layer) if name.partition(".")[2] in config.pattern else layer) for name, layer in chain.layers]
        chain = chain._replace(layers=tuple(again))
    return chain


def sharded(config: Model, mesh, seed: int = 0) -> Callable[[str, str], Seams]:
    """What fills the seams of a layer, by its name and kind."""
    tp, layout = mesh.axis("tp"), mesh.layout
    cp, ends = mesh.axis("cp"), sequence(tp) if layout.sp else tensor(tp)
    mine = tokens_here(mesh)
    heads_before = config.part("HE", tp.size, tp.index).start // config.head_width
    kv_heads = config.part("K", tp.size, tp.index)
    kv_heads, plan = kv_heads.stop - kv_heads.start, blocks.remembering(cp.size)

    def fill(name: str, kind: str) -> Seams:
        lengths, completes = norm_groups(config, tp) if kind == "mamba2" else (None, Pair(*over(tp)[:2]))
        purpose = "embedding" if kind == "embedding" else "residual"
        def dropped(first):
            return attention_dropout(config.dropout, seed, name, heads_before + first)
        core = context_core(cp, layout.cp_attention, kv_heads, dropped, config.reach, plan) if layout.cp > 1 else \
            blocks.core(dropped(0), config.reach, plan)
        enter, leave = (KEEP, KEEP) if layout.tp_ring and kind in config.pattern else ends
        into, out_of = overlapped(tp) if layout.tp_ring else (None, None)
        return Seams(
            enter, leave, dropout(config.dropout, seed, purpose, name), completes,
            into=into, out_of=out_of, core=recomputed_core(core) if layout.recompute == "selective" else core, mine=mine,
            first=config.part("V", tp.size, tp.index).start, lengths=lengths)
    return fill


def tokens_here(mesh) -> Callable:
    """The batch of those tokens that this rank has outside the layers."""
    return share_of_tokens(mesh.axis("tp")) if mesh.layout.sp else _all


def _all(batch):
    return batch
