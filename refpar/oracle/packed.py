"""Batches of random tokens for proofs: every shape of documents and masks that a text can have, and none that it cannot."""
from __future__ import annotations

import numpy as np

from refpar.corpus import IGNORED, Batch


def packed(seed, rows: int, sequence: int, vocab: int, lengths=(7, 1, 12, 3), ignored=(0.0,), step: int = 0) -> Batch:
    """A batch as hard as a text can make it, for proofs: random tokens in documents of the given lengths.

    seed: a number or a numpy Generator.  lengths: the documents' lengths, over and over, laid end to end through all rows; a
    document that a row's end cuts goes on in the next row, whose first position is then above 0.  Ids of documents are in no
    order.  ignored: the share of each row's targets to ignore, over and over; 1 masks a row wholly.
    """
    if min(lengths, default=0) < 1:
        raise ValueError(f"packed: document lengths {tuple(lengths)} must each be at least 1, and there must be one")
    random = np.random.default_rng(seed)
    size = rows * sequence
    tokens = random.integers(0, vocab, size + 1)
    number = np.repeat(np.arange(size + 1), np.resize(lengths, size + 1))[:size + 1]
    position = np.arange(size + 1) - np.searchsorted(number, number)
    names = random.permutation(size + 1) - size // 2
    targets = np.where(number[1:] == number[:-1], tokens[1:], IGNORED).reshape(rows, sequence)
    drop = random.random((rows, sequence)) < np.resize(ignored, rows)[:, None]
    return Batch(*(array[:size].reshape(rows, sequence).astype(np.int64) for array in
                   (tokens, np.where(drop, IGNORED, targets).ravel(), position, names[number], np.arange(size))), step=step)
