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
from refpar.nn.seams import Pair, Seams
from refpar.parallel.tensor import sequence, share_of_tokens, tensor
from refpar.parallel.vocabulary import cross_entropy


def model(config: Model, mesh, seed: int = 0, around: Callable = lambda fill: fill) -> Chain:
    """The model's chain as this rank of the mesh runs it.  `seed` is that of dropout; `around(fill) -> fill` may watch the seams."""
    return build(config, seed, around(sharded(config, mesh, seed)))._replace(loss=cross_entropy(config, mesh.axis("tp")))


def sharded(config: Model, mesh, seed: int = 0) -> Callable[[str, str], Seams]:
    """What fills the seams of a layer, by its name and kind."""
    tp, layout = mesh.axis("tp"), mesh.layout
    enter, leave = sequence(tp) if layout.sp else tensor(tp)
    mine = share_of_tokens(tp) if layout.sp else _all
    heads_before = config.part("HE", tp.size, tp.index).start // config.head_width
    plan = blocks.remembering()

    def fill(name: str, kind: str) -> Seams:
        group = mesh.run(config.groups) if kind == "mamba2" else tp         # who shares what `over` completes
        purpose = "embedding" if kind == "embedding" else "residual"
        return Seams(
            enter, leave, dropout(config.dropout, seed, purpose, name), Pair(*over(group)[:2]),
            core=blocks.core(attention_dropout(config.dropout, seed, name, heads_before), config.reach, plan),
            total=lambda width: config.norm_width, mine=mine, first=config.part("V", tp.size, tp.index).start)
    return fill


def _all(batch):
    return batch
