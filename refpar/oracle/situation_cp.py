"""A situation of attention over context-parallel ranks: sizes, a mask, an order of tokens.  Frozen; its repr makes it again."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from refpar.corpus import Batch
from refpar.nn.attention import EVERYTHING, places, visible
from refpar.nn.dropout import attention_dropout
from refpar.oracle.packed import packed
from refpar.oracle.properties_nn import with_pads


class Drawn(NamedTuple):
    """What attention is given and asked: q, dout [B, S, H, E]; k, v [B, S, K, E]."""
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray


@dataclass(frozen=True)
class ContextSituation:
    """Rows of drawn queries, keys and values, cut over the ranks of one axis."""
    ranks: int = 2
    way: str = "ring"                       # the option: ring, zigzag, striped, gather, ulysses, ulysses+ring
    moved: str = "kv"                       # what travels round a ring: kv or q
    rows: int = 2
    tokens: int = 8                         # of a row, pads aside
    pads: int = 0                           # of a row, anywhere among its tokens
    heads: int = 4
    kv_heads: int = 2
    width: int = 4                          # E
    window: int = 0                         # 0: none
    documents: tuple[int, ...] = (10_000,)  # their lengths, over and over
    loud: float = 1.0                       # queries of every third token are this much larger
    first: int = 0                          # heads before mine, of other tp ranks
    dropout: float = 0.0
    dtype: str = "float64"
    node: int | None = None                 # ranks of one node
    seed: int = 0

    @property
    def reach(self) -> int:
        return self.window or EVERYTHING

    @property
    def length(self) -> int:
        """Tokens of a row, pads among them."""
        return self.tokens + self.pads

    def batch(self) -> Batch:
        """Whole rows."""
        batch = packed(self.seed, self.rows, self.tokens, 9, self.documents, step=3)
        return with_pads(batch, self.pads, 9, np.random.default_rng(self.seed))[0] if self.pads else batch

    def drop(self, first: int = 0):
        """The mask of heads that begin at `first` of mine."""
        return attention_dropout(self.dropout, self.seed, "1.attention", self.first + first)

    def drawn(self, changed: tuple[int, int] | None = None) -> Drawn:
        """What attention is given; `changed`: (row, column) of a token that has another query, key and value."""
        rng = np.random.default_rng([self.seed, 5])
        arrays = [rng.standard_normal((self.rows, self.length, heads, self.width)).astype(self.dtype)
                  for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        arrays[0][:, ::3] *= self.loud
        for x in arrays[:3] if changed else []:
            x[changed] = rng.standard_normal(x[changed].shape)
        return Drawn(*arrays)

    def seen(self) -> np.ndarray:
        """[B, S, S], true where a query may see a key."""
        return visible(places(self.batch()), places(self.batch()), self.reach)
