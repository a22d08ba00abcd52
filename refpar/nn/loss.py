"""Cross-entropy as a sum: (loss, count) over the targets that are not ignored; nothing is averaged here.

Over part of the vocabulary the result is partial: the largest logit, the sum of exponentials below it, and the target's logit if
the target is here.  Parts merge in any order; the identity is a part without words.  Rows are handled in blocks that fit the cache.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar.nn.ops import flat

ROWS = 64                       # rows of logits handled at a time


class Spread(NamedTuple):
    """Over some words: the largest logit, the sum of exp(logit - top), the target's logit or 0; [T] each."""
    top: np.ndarray
    total: np.ndarray
    target: np.ndarray


def _finite(top):
    """-inf, the largest of nothing, becomes the lowest number: then -inf - finite(-inf) is -inf and not NaN."""
    return np.maximum(top, np.finfo(top.dtype).min)


def _here(targets, first: int, words: int):
    """Of targets [T]: which are words of this part, and where they stand in it.  An ignored one, -1, is in no part."""
    local = targets - first
    rows = np.flatnonzero((local >= 0) & (local < words))
    return rows, local[rows]


def partial(logits, targets, first: int = 0) -> Spread:
    """logits [T, V/tp] of the words from `first` on, targets [T] counted over all words."""
    top = logits.max(axis=1, initial=-np.inf)                                       # [T]
    total, target = np.zeros_like(top), np.zeros_like(top)
    ones = np.ones(logits.shape[1], logits.dtype)
    for begin in range(0, len(logits), ROWS):
        block = slice(begin, begin + ROWS)
        below = logits[block] - _finite(top[block])[:, None]
        total[block] = np.exp(below, out=below) @ ones
    rows, words = _here(targets, first, logits.shape[1])
    target[rows] = logits[rows, words]
    return Spread(top, total, target)


def merge(a: Spread, b: Spread) -> Spread:
    """Over the words of both."""
    top = np.maximum(a.top, b.top)
    shift = _finite(top)
    return Spread(top, a.total * np.exp(a.top - shift) + b.total * np.exp(b.top - shift), a.target + b.target)


def finish(spread: Spread, targets):
    """((loss, count), lse [T]) over all words."""
    lse = spread.top + np.log(spread.total)
    counted = targets >= 0
    return (np.sum((lse - spread.target)[counted]), int(counted.sum())), lse


def cross_entropy_forward(logits, targets, first: int = 0):
    """logits [..., V], targets [...] (-1 ignored) -> (sum of -log p(target), count), saved."""
    rows = targets.reshape(targets.size)
    result, lse = finish(partial(flat(logits), rows, first), rows)
    return result, {"logits": logits, "lse": lse, "targets": targets}


def cross_entropy_backward(scale, saved, first: int = 0):
    """`scale`, the gradient of the summed loss -> dlogits [..., V] = scale (softmax - one-hot), 0 where ignored."""
    logits, targets = flat(saved["logits"]), saved["targets"].reshape(saved["targets"].size)
    dlogits = np.empty_like(logits)
    weight = (targets >= 0).astype(logits.dtype) * float(scale)                     # [T]
    for begin in range(0, len(logits), ROWS):
        block = slice(begin, begin + ROWS)
        np.subtract(logits[block], saved["lse"][block, None], out=dlogits[block])
        np.exp(dlogits[block], out=dlogits[block])
        dlogits[block] *= weight[block, None]
    rows, words = _here(targets, first, logits.shape[1])
    dlogits[rows, words] -= weight[rows]
    return dlogits.reshape(saved["logits"].shape)
