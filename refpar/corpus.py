"""Text to batches: any rank computes any part of any step's batch from the step number, so no batch is ever sent.

Tokens are bytes.  A text (`refpar/reading.py`) is documents laid end to end; its last tenth is held out.  Row r of step s is a
window of the train text whose place is a digest of (seed, s, r), so it does not depend on who asks for it or on what was drawn
before.  Held-out windows follow each other and cover every byte once.

Masks, rotary angles, resets and dropout are functions of the five arrays of a batch and of nothing else.
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from refpar.config import Training, share

IGNORED = -1
HELD_OUT = 10               # one part in so many, at the end, is held out


class Batch(NamedTuple):
    """Five integer arrays [B, S], the number of the step, and the batch of whole rows where this one is a part of their columns."""
    tokens: np.ndarray
    targets: np.ndarray         # the token that follows; -1 is ignored
    position: np.ndarray        # in its document: rises by 1 or returns to 0, and only a row's first may start above 0; -1 is a pad
    document: np.ndarray        # equal within a document, different between two documents of a row; pads have their own
    index: np.ndarray           # place in the whole step, row*S + column: the key of all randomness
    step: int = 0
    whole: Batch | None = None  # computed on every rank, never sent
    before: Batch | None = None # of the whole rows' slices, where a schedule cuts them: the one before this

    def cut(self, rows=slice(None), columns=slice(None)) -> Batch:
        """Some rows and some columns of the batch (slices, or arrays that also give the order), and no hold on the rest."""
        kin = (batch and batch.cut(rows) for batch in (self.whole, self.before))
        return Batch(*(array[rows][:, columns].copy() for array in self[:5]), self.step, *kin)

    @property
    def count(self) -> int:
        """How many targets are not ignored: the count of a loss that is (sum, count)."""
        return int((self.targets != IGNORED).sum())


class Text(NamedTuple):
    """Documents laid end to end, int64 [n] each."""
    tokens: np.ndarray
    document: np.ndarray        # the number of the document
    begin: np.ndarray           # where in this text the document begins

    @property
    def size(self) -> int:
        return self.tokens.size


@dataclass(frozen=True)
class Corpus:
    """A text to train on and its end, held out."""
    name: str
    train: Text
    held_out: Text


def lay(documents: list[bytes]) -> Text:
    """Lay documents end to end; an empty one leaves no trace."""
    sizes = np.array([len(document) for document in documents], np.int64)
    number = np.arange(len(documents))
    tokens = np.frombuffer(b"".join(documents), np.uint8).astype(np.int64)
    return Text(tokens, np.repeat(number, sizes), np.repeat(np.cumsum(sizes) - sizes, sizes))


def split(name: str, documents: list[bytes], sequence: int) -> Corpus:
    """Documents as a corpus of that name, long enough for windows of `sequence` tokens: its last tenth is held out."""
    size = sum(map(len, documents))
    split = size - size // HELD_OUT
    if split <= sequence:
        raise ValueError(f"text: {name} has {size} bytes, {split} of them to train on, and a sequence of {sequence} tokens "
                         f"and the one that follows need {sequence + 1}")
    train, held_out = _cut(documents, split)
    if not (_next_in_document(held_out, np.arange(held_out.size)) != IGNORED).any():
        raise ValueError(f"text: the held-out end of {name} has {held_out.size} of {size} bytes and no two of one document, "
                         f"so nothing can be predicted in it")
    return Corpus(name, train, held_out)


def _cut(documents: list[bytes], place: int) -> tuple[Text, Text]:
    """Two texts, cut at a byte.  A document that is cut becomes two: no target and no context crosses the cut."""
    before, after, begin = [], [], 0
    for document in documents:
        cut = min(max(place - begin, 0), len(document))
        before.append(document[:cut])
        after.append(document[cut:])
        begin += len(document)
    return lay(before), lay(after)


def batch(corpus: Corpus, training: Training, step: int, rows: slice = slice(None)) -> Batch:
    """Some rows (all, as it stands) of the batch of one step."""
    numbers = np.arange(training.rows)[rows]                                    # [B]
    places = corpus.train.size - training.sequence
    starts = [_draw(places, training.seed, step, row) for row in numbers]
    return _windows(corpus.train, np.array(starts, np.int64), numbers, training.sequence, step)


def _draw(places: int, seed: int, step: int, row: int) -> int:
    """Where the row begins: a digest of its key, the same on every rank."""
    digest = hashlib.blake2b(f"refpar row {seed} {step} {row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % places


def held_out_rows(corpus: Corpus, sequence: int) -> int:
    """How many windows the held-out text fills, a last incomplete one included."""
    return -(-corpus.held_out.size // sequence)


def held_out(corpus: Corpus, sequence: int, rows: slice = slice(None)) -> Batch:
    """Some of the held-out windows, in order.  The last is filled up with ignored tokens, a document of their own."""
    numbers = np.arange(held_out_rows(corpus, sequence))[rows]                  # [B]
    return _windows(corpus.held_out, numbers * sequence, numbers, sequence, step=0)


def _windows(text: Text, starts: np.ndarray, numbers: np.ndarray, sequence: int, step: int) -> Batch:
    """Rows that begin at `starts` [B], as the rows `numbers` [B] of the step."""
    column = np.arange(sequence)
    place = starts[:, None] + column                                            # [B, S]
    inside = place < text.size
    at = np.minimum(place, text.size - 1)
    begin = np.where(inside, text.begin[at], text.size)
    return Batch(tokens=np.where(inside, text.tokens[at], 0),
                 targets=_next_in_document(text, place),
                 position=place - np.maximum(begin, starts[:, None]),           # since its row or its document began
                 document=np.where(inside, text.document[at], -1 - numbers[:, None]),
                 index=numbers[:, None] * sequence + column,
                 step=step)


def _next_in_document(text: Text, place: np.ndarray) -> np.ndarray:
    """The token that follows each place, or IGNORED where another document or nothing follows."""
    last = text.size - 1
    at, following = np.minimum(place, last), np.minimum(place + 1, last)
    return np.where((place < last) & (text.document[at] == text.document[following]), text.tokens[following], IGNORED)


def micro_batches(rows: int, ranks: int, rank: int, count: int) -> list[slice]:
    """The rows of one dp rank, cut into `count` micro-batches: shares of a share.  Unequal and empty ones are normal."""
    mine = share(rows, ranks, rank)
    parts = [share(mine.stop - mine.start, count, i) for i in range(count)]
    return [slice(mine.start + part.start, mine.start + part.stop) for part in parts]
