"""Attention of given queries, keys and values: who sees whom, and what a core is.  `nn/blocks.py` has the core of a single process,
`oracle/naive.py` the plain one that judges it.

Token i sees key j iff both are of one document, j's position is not after i's, and, in a sliding window, less than its width before
it (Beltagy et al. 2020).  That is all there is to the mask: a function of the batch's arrays, and for the keys that lie before
these tokens, of the arrays that came with them.  Where the keys are stored, in which order and on which rank, does not matter.

A core is a pair, and a filling of the seam `core`:

    forward(q, k, v, batch, before) -> out, after, saved             q, out [B, S, H, E]; k, v [B, S, K, E]
    backward(dout, dafter, saved, batch) -> dq, dk, dv, dbefore

`before` holds the keys so far, k and v [B, R, K, E] and their document, position and index [B, R]; `after` is that with the keys
of these tokens appended.  Gradients of the two hold k and v alone.  Each key head serves a group of H/K query heads (grouped-query
attention, Ainslie et al. 2023).
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np



EVERYTHING = np.iinfo(np.int64).max             # the window of a token that sees all that came before it


class Places(NamedTuple):
    """Where some tokens stand, [B, S] each: enough to say who sees whom, and to key the randomness of a pair."""
    document: np.ndarray
    position: np.ndarray
    index: np.ndarray


def places(batch) -> Places:
    """The places of a batch's tokens."""
    return Places(batch.document, batch.position, batch.index)


def visible(queries: Places, keys: Places, window: int = EVERYTHING) -> np.ndarray:
    """[B, S, T], true where a query may see a key."""
    same = queries.document[:, :, None] == keys.document[:, None, :]
    distance = queries.position[:, :, None] - keys.position[:, None, :]
    same &= distance >= 0
    same &= distance < window
    return same


def start(batch, heads: int, width: int, dtype) -> dict:
    """No keys yet."""
    rows = len(batch.position)
    nothing = np.zeros((rows, 0), np.int64)
    return {"k": np.zeros((rows, 0, heads, width), dtype), "v": np.zeros((rows, 0, heads, width), dtype),
            "document": nothing, "position": nothing, "index": nothing}


def extend(before: dict, k, v, batch) -> dict:
    """The keys so far, and these tokens' after them."""
    own = {"k": k, "v": v, **places(batch)._asdict()}
    return {name: np.concatenate([before[name], own[name]], axis=1) for name in before}


def keys_of(after: dict) -> Places:
    """The places of the keys so far."""
    return Places(after["document"], after["position"], after["index"])


def share_out(dk, dv, dafter: dict, tokens: int):
    """Gradients of all keys [B, R+S, K, E], and what the future sends to them -> (dk, dv) of these tokens, dbefore."""
    dk, dv = dk + dafter["k"], dv + dafter["v"]
    earlier = dk.shape[1] - tokens
    return dk[:, earlier:], dv[:, earlier:], {"k": dk[:, :earlier], "v": dv[:, :earlier]}
