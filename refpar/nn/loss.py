"""Cross-entropy as a sum: (loss, count) over the targets that are not ignored; nothing is averaged here.

At each target the loss is -sum q log p = lse - <q, logits>, where p is the softmax of the logits, lse the log of its denominator,
and q what the target stands for: its own word, or with label smoothing (Szegedy et al. 2016) also a little of every word.  The
z-loss z * lse**2 keeps the denominator near 1 (Chowdhery et al. 2022).  Its gradient is (1 + 2 z lse) p - q.

Over part of the vocabulary the result is partial: the largest logit, the sum of exponentials below it, and that part's addend of
<q, logits>.  Parts merge in any order; the identity is a part without words.  Rows are handled in blocks that fit the cache.

A table may be padded to a rounder size: then the logits beyond the `words` of the vocabulary are no part of anything.
"""
from __future__ import annotations

import sys
from typing import Callable, NamedTuple

import numpy as np

from refpar.nn.ops import flat
from refpar.nn.seams import Pair

ROWS = 64                       # rows of logits handled at a time
ALL = sys.maxsize               # words, where no table is padded


class Spread(NamedTuple):
    """Over some words: the largest logit, the sum of exp(logit - top), the sum of q times logit; [T] each."""
    top: np.ndarray
    total: np.ndarray
    expected: np.ndarray


class Target(NamedTuple):
    """The distribution q that a target stands for, on the words from `first` on.

    expected(logits [T, V/tp], targets [T], first) -> sum of q times logit, [T]
    subtract(dlogits [T, V/tp], weight [T], targets, first): dlogits -= weight q, in place
    """
    expected: Callable
    subtract: Callable


def _finite(top):
    """-inf, the largest of nothing, becomes the lowest number: then -inf - finite(-inf) is -inf and not NaN."""
    return np.maximum(top, np.finfo(top.dtype).min)


def _here(targets, first: int, words: int):
    """Of targets [T]: which are words of this part, and where they stand in it.  An ignored one, -1, is in no part."""
    local = targets - first
    rows = np.flatnonzero((local >= 0) & (local < words))
    return rows, local[rows]


def _own(logits, targets, first):
    expected = np.zeros(len(logits), logits.dtype)
    rows, words = _here(targets, first, logits.shape[1])
    expected[rows] = logits[rows, words]
    return expected


def _subtract_own(dlogits, weight, targets, first):
    rows, words = _here(targets, first, dlogits.shape[1])
    dlogits[rows, words] -= weight[rows]


ONE_HOT = Target(_own, _subtract_own)


def smoothed(smoothing: float, vocab: int) -> Target:
    """1 - smoothing on the target's own word, and `smoothing` spread evenly over all `vocab` words."""
    own, even = 1 - smoothing, smoothing / vocab

    def expected(logits, targets, first):
        return own * ONE_HOT.expected(logits, targets, first) + even * logits.sum(axis=1)

    def subtract(dlogits, weight, targets, first):
        ONE_HOT.subtract(dlogits, own * weight, targets, first)
        dlogits -= (even * weight)[:, None]

    return Target(expected, subtract)


def target_of(vocab: int, smoothing: float) -> Target:
    """What a target stands for, in a model of `vocab` words."""
    return smoothed(smoothing, vocab) if smoothing else ONE_HOT


def partial(logits, targets, first: int = 0, q: Target = ONE_HOT) -> Spread:
    """logits [T, V/tp] of the words from `first` on, targets [T] counted over all words."""
    top = logits.max(axis=1, initial=-np.inf)                                       # [T]
    total, ones = np.zeros_like(top), np.ones(logits.shape[1], logits.dtype)
    for begin in range(0, len(logits), ROWS):
        block = slice(begin, begin + ROWS)
        below = logits[block] - _finite(top[block])[:, None]
        total[block] = np.exp(below, out=below) @ ones
    return Spread(top, total, q.expected(logits, targets, first))


def merge(a: Spread, b: Spread) -> Spread:
    """Over the words of both."""
    top = np.maximum(a.top, b.top)
    shift = _finite(top)
    return Spread(top, a.total * np.exp(a.top - shift) + b.total * np.exp(b.top - shift), a.expected + b.expected)


def finish(spread: Spread, targets, z: float = 0.0):
    """((loss, count), lse [T]) over all words."""
    lse = spread.top + np.log(spread.total)
    losses, counted = lse - spread.expected + z * lse * lse, targets >= 0
    return (np.sum(losses[counted]), int(counted.sum())), lse


def real(logits, first: int, words: int):
    """Those of logits [T, V/tp], from word `first` on, that belong to one of `words` words: a view."""
    return logits[:, :max(0, words - first)]


def cross_entropy_forward(logits, targets, first: int = 0, q: Target = ONE_HOT, z: float = 0.0, words: int = ALL):
    """logits [..., V], targets [...] (-1 ignored) -> (summed loss, count), saved."""
    rows = targets.reshape(targets.size)
    result, lse = finish(partial(real(flat(logits), first, words), rows, first, q), rows, z)
    return result, {"logits": logits, "lse": lse, "targets": targets}


def cross_entropy_backward(scale, saved, first: int = 0, q: Target = ONE_HOT, z: float = 0.0, words: int = ALL):
    """`scale`, the gradient of the summed loss -> dlogits [..., V] = scale ((1 + 2 z lse) softmax - q), 0 where ignored."""
    targets, dwhole = saved["targets"].reshape(saved["targets"].size), np.zeros_like(saved["logits"])
    logits, dlogits = real(flat(saved["logits"]), first, words), real(flat(dwhole), first, words)
    weight = (targets >= 0).astype(logits.dtype) * float(scale)                     # [T]
    of_softmax = weight * (1 + 2 * z * saved["lse"])                                # [T]
    for begin in range(0, len(logits), ROWS):
        block = slice(begin, begin + ROWS)
        np.subtract(logits[block], saved["lse"][block, None], out=dlogits[block])
        np.exp(dlogits[block], out=dlogits[block])
        dlogits[block] *= of_softmax[block, None]
    q.subtract(dlogits, weight, targets, first)
    return dwhole


def cross_entropy(vocab: int = ALL, smoothing: float = 0.0, z: float = 0.0) -> Pair:
    """The loss of a model whose vocabulary is in one place: forward(logits, targets), backward(scale, saved)."""
    q = target_of(vocab, smoothing)

    def forward(logits, targets):
        return cross_entropy_forward(logits, targets, q=q, z=z, words=vocab)

    def backward(scale, saved):
        return cross_entropy_backward(scale, saved, q=q, z=z, words=vocab)

    return Pair(forward, backward)
