"""A situation of a Mamba layer over context-parallel ranks: sizes, texts, an order of tokens.  Frozen; its repr makes it again."""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from refpar.config import PRESETS, Model
from refpar.corpus import Batch, packed
from refpar.oracle.properties_nn import with_pads


@dataclass(frozen=True)
class StateSituation:
    """One layer, whose rows are cut over the ranks of one axis."""
    kind: str = "mamba2"                    # or mamba1
    option: str = "gather"                  # gather, chain, scan, heads
    way: str = "contiguous"                 # the order of the stream: contiguous, zigzag, striped
    ranks: int = 3
    rows: int = 2
    tokens: int = 16                        # of a row, pads aside
    pads: int = 0                           # of a row, anywhere among its tokens
    heads: int = 4                          # M; Mamba-1 has as many channels
    groups: int = 2
    conv: int = 4
    chunk: int = 5
    documents: tuple[int, ...] = (5, 9)     # their lengths, over and over
    given: bool = True                      # a past before the rows, and a gradient of what they leave behind
    dtype: str = "float64"
    node: int | None = None                 # ranks of one node
    seed: int = 0

    @property
    def model(self) -> Model:
        return replace(PRESETS[f"{self.kind}-uneven"], blocks=1, width=6, ssm_heads=self.heads, ssm_head_width=3, groups=self.groups,
                       state=2, inner=self.heads, dt_rank=2, conv=self.conv, chunk=self.chunk)

    @property
    def length(self) -> int:
        """Tokens of a row, pads among them."""
        return self.tokens + self.pads

    def batch(self) -> Batch:
        """Whole rows."""
        batch = packed(self.seed, self.rows, self.tokens, 9, self.documents)
        return with_pads(batch, self.pads, 9, np.random.default_rng(self.seed))[0] if self.pads else batch

    def drawn(self, key: int, changed=None) -> np.ndarray:
        """x or dy, [B, S, D]; other numbers where `changed` [B, S] is true."""
        rng, shape = np.random.default_rng([self.seed, key]), (self.rows, self.length, self.model.width)
        x, other = rng.standard_normal((2, *shape)).astype(self.dtype)
        return x if changed is None else np.where(changed[..., None], other, x)

    def weights(self, dims: dict[str, str]) -> dict[str, np.ndarray]:
        """Weights large enough for every part of the layer to count."""
        rng = np.random.default_rng([self.seed, 0])
        return {name: rng.normal(0, 0.5, self.model.shape(text)).astype(self.dtype) for name, text in dims.items()}

    def past(self, start: dict, key: int) -> dict:
        """What lies before the rows, or the gradient of what lies behind: `start`, or drawn like it."""
        rng = np.random.default_rng([self.seed, key])
        return {name: rng.standard_normal(array.shape).astype(array.dtype) if self.given else array
                for name, array in start.items()}
