"""A situation of the loss over words that tensor-parallel ranks share.  Frozen; its repr makes it again."""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from refpar.config import PRESETS, Model


@dataclass(frozen=True)
class LossSituation:
    """Logits of so many tokens over a vocabulary."""
    ranks: int = 2
    tokens: int = 5
    words: int = 7
    pads: int = 0               # columns of the table beyond its words
    spread: float = 1.0         # the logits' standard deviation
    ignored: float = 0.0        # the share of targets that count nothing
    smoothing: float = 0.0
    z_loss: float = 0.0
    dtype: str = "float64"
    seed: int = 0

    @property
    def model(self) -> Model:
        return replace(PRESETS["llama-uneven"], vocab=self.words, padded_vocab=self.words + self.pads, smoothing=self.smoothing,
                       z_loss=self.z_loss)

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """logits [1, T, V] of all words, and targets [1, T]."""
        rng, shape = np.random.default_rng(self.seed), (1, self.tokens)
        logits = (self.spread * rng.standard_normal((*shape, self.words + self.pads))).astype(self.dtype)
        return logits, np.where(rng.random(shape) < self.ignored, -1, rng.integers(0, self.words, shape))
