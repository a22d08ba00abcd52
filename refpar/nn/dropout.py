"""Dropout (Srivastava et al. 2014) whose mask is a pure function of the element's place in the whole, as `nn/keyed.py` draws it.

Kept elements are divided by the chance of being kept.  Backward draws the same mask again, so nothing is saved, and a shard of the
tokens, in any order, drops exactly what the whole would.  At rate 0 the seam is filled with the identity: decided once, here.
"""
from __future__ import annotations

import numpy as np

from refpar.nn.keyed import key, uniform
from refpar.nn.seams import KEEP, Pair


def _multiplier(rate: float, dtype, key: int, *parts) -> np.ndarray:
    """0 with chance `rate`, else 1 / (1 - rate)."""
    return (uniform(key, *parts) >= rate).astype(dtype) * (1 / (1 - rate))


def dropout(rate: float, seed: int, purpose: str, name: str) -> Pair:
    """forward(x [B, S, D], batch), backward(dy, batch): a diagonal map, so it is its own transpose."""
    if rate == 0:
        return KEEP

    def drop(x, batch):
        mask = _multiplier(rate, x.dtype, key(seed, purpose, name, batch.step), batch.index[..., None], np.arange(x.shape[-1]))
        mask *= x                                                                   # [B, S, D]
        return mask
    return Pair(drop, drop)


def attention_dropout(rate: float, seed: int, name: str, first: int = 0):
    """mask(step, queries [B, S], heads, keys [B, T], dtype) -> multiplier [B, heads, S, T] of attention's probabilities, or None.

    Queries and keys are global indices, so a block, a shard or the whole may be asked for; `first` is my first head.
    """
    if rate == 0:
        return None

    def mask(step, queries, heads, keys, dtype):
        head = np.arange(first, first + heads)[:, None, None]
        return _multiplier(rate, dtype, key(seed, "attention", name, step),
                           queries[:, None, :, None], head, keys[:, None, None, :])
    return mask
