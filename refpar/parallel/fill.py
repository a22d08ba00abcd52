"""Fills the seams of every layer for a rank of a mesh: the one place where a layer meets its axes.

`model` is `nn.build.build` with these fillings.  What a rank of a mesh of size 1 gets is the single process, by the same path.
"""
from __future__ import annotations

from functools import partial
from typing import Callable

from refpar.comm.pairs import over
from refpar.config import Model
from refpar.nn import blocks
from refpar.nn.build import build
from refpar.nn.chain import Chain
from refpar.nn.dropout import attention_dropout, dropout
from refpar.nn.recompute import recomputed, recomputed_core
from refpar.nn.seams import KEEP, Pair, Seams
from refpar.parallel.mamba import in_runs, mamba_seams, reorders
from refpar.parallel.order import way_of
from refpar.parallel.overlap import overlapped
from refpar.parallel.tensor import norm_groups, sequence, share_of_tokens, tensor
from refpar.parallel.ulysses import context_core
from refpar.parallel.vocabulary import cross_entropy

STATE = ("mamba1", "mamba2")


def model(config: Model, mesh, seed: int = 0, around: Callable = lambda fill: fill) -> Chain:
    """The model's chain as this rank of the mesh runs it.  `seed` is that of dropout; `around(fill) -> fill` may watch the seams."""
    chain = build(config, seed, around(sharded(config, mesh, seed)))._replace(loss=cross_entropy(config, mesh.axis("tp")))
    again = {kind for kind in config.pattern if mesh.layout.computes_again(kind)}
    layers = ((name, recomputed(layer) if name.partition(".")[2] in again else layer) for name, layer in chain.layers)
    return chain._replace(layers=tuple(layers))


def sharded(config: Model, mesh, seed: int = 0) -> Callable[[str, str], Seams]:
    """What fills the seams of a layer, by its name and kind."""
    tp, layout = mesh.axis("tp"), mesh.layout
    cp, ends, way = mesh.axis("cp"), sequence(tp) if layout.sp else tensor(tp), way_of(config, layout)
    heads, keys = config.part("HE", tp.size, tp.index), config.part("K", tp.size, tp.index)
    plan = blocks.remembering(cp.size)

    def core(name: str) -> Pair:
        """Attention, over the tokens of other ranks too."""
        def dropped(first):
            return attention_dropout(config.dropout, seed, name, heads.start // config.head_width + first)
        alone = blocks.core(dropped(0), config.reach, plan)
        filled = context_core(cp, way, keys.stop - keys.start, dropped, config.reach, plan) if layout.cp > 1 else alone
        return recomputed_core(filled) if layout.recompute == "selective" else filled

    def fill(name: str, kind: str) -> Seams:
        common = Seams(*ends, dropout(config.dropout, seed, "embedding" if kind == "embedding" else "residual", name),
                       Pair(*over(tp)[:2]), mine=tokens_here(mesh), first=config.part("V", tp.size, tp.index).start)
        moved = kind in STATE and reorders(kind, layout.cp_mamba, way)
        if layout.tp_ring and kind in config.pattern and not moved:
            common = common._replace(**dict(zip(("enter", "leave", "into", "out_of"), (KEEP, KEEP, *overlapped(tp)))))
        if kind == "attention":
            return common._replace(core=core(name))
        if kind not in STATE:
            return common
        lengths, completed = norm_groups(config, tp)
        norm = {"lengths": lengths, "over": completed} if kind == "mamba2" else {}
        return common._replace(**norm, **mamba_seams(config, kind, cp, layout.cp_mamba, way),
                               order=partial(in_runs, cp=cp, way=way) if moved else common.order)
    return fill


def tokens_here(mesh) -> Callable:
    """The batch of those tokens that this rank has outside the layers."""
    return share_of_tokens(mesh.axis("tp")) if mesh.layout.sp else lambda batch: batch
