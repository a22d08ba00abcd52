"""Attention of given queries, keys and values, in its naive form: the meaning, and the judge of the fast one in `nn/blocks.py`.

Token i sees key j iff both are of one document, j's position is not after i's, and, in a sliding window, less than its width before
it (Beltagy et al. 2020).  That is all there is to the mask: a function of the batch's arrays, and for the keys that lie before
these tokens, of the arrays that came with them.  Where the keys are stored,
in which order and on which rank, does not matter.

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

from refpar.nn.seams import Pair


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


def naive_core(drop=None, window: int = EVERYTHING) -> Pair:
    """Full softmax over all pairs.  `drop` is a mask of the probabilities as in `nn/dropout.py`, or None."""
    def weights(q, k, batch, after):
        """Probabilities [B, H, S, T], and those that dropout left."""
        scores = np.einsum("bshe,bthe->bhst", q, k) * q.shape[-1] ** -0.5
        seen = visible(places(batch), keys_of(after), window)[:, None]
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
        p /= p.sum(axis=-1, keepdims=True)
        mask = 1 if drop is None else drop(batch.step, batch.index, q.shape[2], after["index"], q.dtype)
        return p, mask

    def repeated(k, heads):
        """[B, T, K, E] -> [B, T, H, E]: each key head once for every query head that it serves."""
        return np.repeat(k, heads // k.shape[2], axis=2)

    def forward(q, k, v, batch, before):
        after = extend(before, k, v, batch)
        p, mask = weights(q, repeated(after["k"], q.shape[2]), batch, after)
        out = np.einsum("bhst,bthe->bshe", p * mask, repeated(after["v"], q.shape[2]))
        return out, after, {"q": q, "after": after}

    def backward(dout, dafter, saved, batch):
        q, after = saved["q"], saved["after"]
        rows, keys, groups, width = after["k"].shape
        k, v = repeated(after["k"], q.shape[2]), repeated(after["v"], q.shape[2])
        p, mask = weights(q, k, batch, after)
        dp = np.einsum("bshe,bthe->bhst", dout, v) * mask
        ds = p * (dp - (dp * p).sum(axis=-1, keepdims=True)) * width ** -0.5            # softmax's own backward
        dq = np.einsum("bhst,bthe->bshe", ds, k)
        grouped = (rows, keys, groups, q.shape[2] // groups, width)
        dk = np.einsum("bhst,bshe->bthe", ds, q).reshape(grouped).sum(axis=3)           # [B, T, K, E]
        dv = np.einsum("bhst,bshe->bthe", p * mask, dout).reshape(grouped).sum(axis=3)
        return dq, *share_out(dk, dv, dafter, q.shape[1])

    return Pair(forward, backward)
