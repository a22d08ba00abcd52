"""Baselines: what a text costs when only the last few bytes are known.

An n-gram model predicts a byte from the n-1 bytes before it.  What it saw too seldom it takes from the shorter context, as
Witten and Bell weigh it: a context h that was seen c(h) times, with t(h) different bytes after it, gives

    p(byte | h) = (c(h, byte) + t(h) p(byte | h without its first byte)) / (c(h) + t(h))

down to the uniform 1/256.  A context that was never seen has c = t = 0 and passes on the shorter one's answer.

It is judged on the targets of the held-out windows: each byte but the first of a document.  Contexts stay inside the
document, but they may reach back over the start of a window, which a trained model may not: this favours the baseline.
Source: Witten and Bell, The zero-frequency problem, IEEE Transactions on Information Theory 37(4), 1991, method C.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar.corpus import Corpus, Text

BYTES = 256
NAMES = ("unigram", "bigram", "trigram")


class Order(NamedTuple):
    """The counts of one order.  A code is the number that context and byte spell in base 256."""
    codes: np.ndarray           # [u] those seen, sorted
    counts: np.ndarray          # [u] c(h, byte)
    contexts: np.ndarray        # [h] the contexts seen, sorted
    seen: np.ndarray            # [h] c(h)
    kinds: np.ndarray           # [h] t(h)


def codes(text: Text, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(targets, codes): the places that have n-1 bytes, and at least one, of their document before them; their code of order n."""
    places = np.arange(text.size)
    places = places[places - text.begin >= max(n - 1, 1)]
    code = np.zeros_like(places)
    for back in range(n - 1, -1, -1):                               # the oldest byte first
        code = code * BYTES + text.tokens[places - back]
    return places, code


def count(text: Text, n: int) -> Order:
    """Count the n-grams of a text; n up to 7 fits into 64 bits."""
    seen, counts = np.unique(codes(text, n)[1], return_counts=True)
    contexts, which, kinds = np.unique(seen // BYTES, return_inverse=True, return_counts=True)
    return Order(seen, counts, contexts, np.bincount(which, counts, minlength=contexts.size).astype(np.int64), kinds)


def _find(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """values of the wanted ones among the sorted keys, 0 where there is none."""
    if not keys.size:
        return np.zeros(wanted.shape, values.dtype)
    at = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def blend(order: Order, code: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """p(byte | context) of each code, given what the shorter context says of the same byte."""
    seen = _find(order.contexts, order.seen, code // BYTES)
    kinds = _find(order.contexts, order.kinds, code // BYTES)
    return np.where(seen > 0, (_find(order.codes, order.counts, code) + kinds * shorter) / np.maximum(seen + kinds, 1), shorter)


def probabilities(text: Text, orders: list[Order]) -> np.ndarray:
    """The probability of each target of a text; near its start a document lends only the context that it has."""
    p = np.full(text.size, 1 / BYTES)
    for n, order in enumerate(orders, start=1):
        places, code = codes(text, n)
        p[places] = blend(order, code, p[places])
    return p[codes(text, 1)[0]]


def baselines(corpus: Corpus) -> dict[str, float]:
    """Name -> cross-entropy of the held-out text, nats per byte, of models counted on the train text."""
    orders = [count(corpus.train, n) for n in range(1, len(NAMES) + 1)]
    return {name: float(-np.log(probabilities(corpus.held_out, orders[:n])).mean()) for n, name in enumerate(NAMES, start=1)}


def described(losses: dict[str, float]) -> str:
    """One line: each loss in nats per byte, and in bits."""
    return ", ".join(f"{name} {nats:.4f} ({nats / np.log(2):.3f} bits)" for name, nats in losses.items())
