"""Writing on: one byte at a time, each from the chain's logits for what came before.

Nothing is computed twice: what a layer's tokens left behind (`after`: keys and values, or the conv's last inputs and the state) is
what lies before the next token (`before`).  The prompt goes through at once, then each new byte alone.  A byte's randomness is
keyed by (seed, its position), so a text that is continued later goes on as if it had not been interrupted.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar.corpus import IGNORED, Batch
from refpar.nn.chain import Chain, forward, start
from refpar.nn.keyed import key, uniform

BYTES = 256                 # a vocabulary may be larger: what is no byte is never drawn


class Text(NamedTuple):
    """A text that is being written: what it left behind in the layers, its length so far, and the logits [V] of its next byte."""
    before: dict
    length: int
    logits: np.ndarray


def tokens_from(tokens: np.ndarray, begin: int) -> Batch:
    """One row of tokens [S], the first at position `begin` of the only document."""
    row = tokens[None].astype(np.int64)                                         # [1, S]
    position = np.arange(begin, begin + row.shape[1])[None]
    return Batch(row, np.full_like(row, IGNORED), position, np.zeros_like(row), position)


def read(chain: Chain, params: dict, tokens: np.ndarray, text: Text | None = None) -> Text:
    """Read some tokens (at least one), from the start or on in a text."""
    batch = tokens_from(tokens, text.length if text else 0)
    before = text.before if text else start(chain, params, batch)
    logits, after, _ = forward(chain, batch.tokens, params, batch, before)      # [1, S, V]
    return Text(after, int(batch.position[0, -1]) + 1, logits[0, -1])


def pick(logits: np.ndarray, temperature: float, key: int, position: int) -> int:
    """A byte from the logits [V]: the likeliest at temperature 0, else drawn with probabilities softmax(logits / temperature)."""
    logits = logits[:BYTES].astype(np.float64)
    if temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / temperature)
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums[:sums.size - 1], uniform(key, position)[0] * sums[sums.size - 1], side="right"))


def sample(chain: Chain, params: dict, prompt: bytes, length: int, seed: int = 0, temperature: float = 1.0) -> bytes:
    """`length` bytes that go on after the prompt.  The chain is one built without dropout."""
    if not prompt:
        raise ValueError("sample: the prompt is empty, and a model needs at least 1 byte to go on from")
    if length < 0 or not 0 <= temperature < np.inf:
        raise ValueError(f"sample: length={length} and temperature={temperature} must not be negative, and must be finite")
    draws, written, new, text = key(seed, "sample", "byte"), b"", prompt, None
    for _ in range(length):
        text = read(chain, params, np.frombuffer(new, np.uint8), text)
        new = bytes([pick(text.logits, temperature, draws, text.length)])
        written += new
    return written
