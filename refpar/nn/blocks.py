"""Attention in blocks of queries, all heads at once: the fast form of `nn/attention.py`.

A block of scores fits the cache, keys after a block's last query are never touched, and backward computes the probabilities again
from the saved log-sum-exp, so memory grows with the tokens and not with their square (Dao et al. 2022).

Attention over *some* keys is a partial result, (out, lse): the softmax average of the values, and the log of the sum that it was divided
by.  Two such results of the same queries merge into that of both sets of keys, in any order and nesting; no keys at all give the identity,
(0, -inf).  Blocks, rings of ranks and split decoding differ only in who merges when.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.nn.attention import Places, extend, keys_of, places, share_out, visible
from refpar.nn.seams import Pair


class Attended(NamedTuple):
    """out [B, S, H, E] over some keys, and lse [B, S, H] of their scores."""
    out: np.ndarray
    lse: np.ndarray


def identity(q) -> Attended:
    """Over no keys."""
    return Attended(np.zeros_like(q), np.full(q.shape[:-1], -np.inf, q.dtype))


def merge(a: Attended, b: Attended) -> Attended:
    """Over the keys of both.  A side that saw nothing has weight exp(-inf) = 0, also where neither saw anything."""
    lse = np.logaddexp(a.lse, b.lse)
    shift = finite(lse)
    out = a.out * np.exp(a.lse - shift)[..., None]
    out += b.out * np.exp(b.lse - shift)[..., None]
    return Attended(out, lse)


def finish(a: Attended) -> np.ndarray:
    """Over all keys: nothing is left to divide by."""
    return a.out


def finite(x) -> np.ndarray:
    """-inf becomes the lowest number, so that -inf - finite(-inf) is -inf and not NaN."""
    return np.maximum(x, np.finfo(x.dtype).min)


# ----------------------------------------------------------------------------------------------- which keys a block must look at

class Block(NamedTuple):
    """Queries `rows` look at the keys `keys`; `bias` [B, s, c] is 0 or -inf on `hiding`, the part of those where something is hidden."""
    rows: slice
    keys: slice
    hiding: slice
    bias: np.ndarray


def _span(flags) -> slice:
    """From the first to the last true flag."""
    true = np.flatnonzero(flags)
    return slice(int(true[0]), int(true[-1]) + 1) if true.size else slice(0, 0)


def block_size(queries: int) -> int:
    """Measured: shorter blocks waste less on hidden keys, longer ones make better matrix products."""
    return 64 if queries <= 512 else 128


def blocks(queries: Places, keys: Places, dtype):
    """Cut the queries into blocks, and find for each the span of keys that any of its queries sees, in any row."""
    tokens = queries.position.shape[1]
    size = block_size(tokens)
    for first in range(0, tokens, size):
        rows = slice(first, min(first + size, tokens))
        seen = visible(Places(*(place[:, rows] for place in queries)), keys)            # [B, s, T]
        span = _span(seen.any(axis=(0, 1)))
        seen = seen[:, :, span]
        hiding = _span(~seen.all(axis=(0, 1)))
        bias = np.where(seen[:, :, hiding], 0, -np.inf).astype(dtype)
        yield Block(rows, span, hiding, bias)


# --------------------------------------------------------------------------------- one block: heads grouped by the key head they share

def _grouped(x, heads: int):
    """x [B, s, H, E] -> [B, K, g*s, E]: the queries of all g heads of a group become rows of one product."""
    rows, tokens, width = x.shape[0], x.shape[1], x.shape[3]
    group = x.shape[2] // heads if heads else 0
    x = x.reshape(rows, tokens, heads, group, width).transpose(0, 2, 3, 1, 4)
    return x.reshape(rows, heads, group * tokens, width)


def _ungrouped(x, tokens: int):
    """[B, K, g*s, ...] -> [B, s, H, ...]."""
    rows, heads, both, *rest = x.shape
    group = both // tokens
    x = np.moveaxis(x.reshape(rows, heads, group, tokens, *rest), 3, 1)
    return x.reshape(rows, tokens, heads * group, *rest)


def _keys(x, span: slice):
    """x [B, T, K, E] -> [B, K, t, E], a view."""
    return x[:, span].transpose(0, 2, 1, 3)


def _scores(q, k, block: Block):
    """q [B, K, g*s, E], k [B, K, t, E] -> [B, K, g*s, t], -inf where hidden."""
    scores = _product("attention scores", q, k.swapaxes(2, 3))
    rows, heads, both, keys = scores.shape
    tokens = block.rows.stop - block.rows.start
    split = scores.reshape(rows, heads, both // tokens, tokens, keys)
    split[..., block.hiding] += block.bias[:, None, None]
    return scores


def _product(name: str, a, b):
    """One matrix product for each row and key head."""
    watch.op(name, 2 * a.shape[0] * a.shape[1] * a.shape[2] * a.shape[3] * b.shape[3])
    return a @ b


def _mask(drop, step, queries: Places, keys: Places, block: Block, shape, dtype):
    """The dropout of a block's probabilities, in their grouped shape."""
    heads = shape[1] * shape[2] // (block.rows.stop - block.rows.start)
    return drop(step, queries.index[:, block.rows], heads, keys.index[:, block.keys], dtype).reshape(shape)


# ------------------------------------------------------------------------------------------------------------ over any set of keys

def partial(q, k, v, queries: Places, keys: Places, drop=None, step: int = 0) -> Attended:
    """Attention of q [B, S, H, E] over the keys k, v [B, T, K, E] that are here."""
    out, lse = identity(q)
    for block in blocks(queries, keys, q.dtype):
        s, heads = block.rows.stop - block.rows.start, k.shape[2]
        k_b, v_b = _keys(k, block.keys), _keys(v, block.keys)
        p = _scores(_grouped(q[:, block.rows] * q.shape[-1] ** -0.5, heads), k_b, block)         # [B, K, g*s, t]
        top = finite(p.max(axis=-1, keepdims=True, initial=-np.inf))
        p -= top
        np.exp(p, out=p)
        total = p @ np.ones(p.shape[-1], p.dtype)                                       # at least exp(0) = 1 where a key is seen
        with np.errstate(divide="ignore"):
            lse[:, block.rows] = _ungrouped(top[..., 0] + np.log(total), s)
        if drop is not None:
            p *= _mask(drop, step, queries, keys, block, p.shape, p.dtype)
        o = _product("attention values", p, v_b)
        o /= np.maximum(total, 1)[..., None]
        out[:, block.rows] = _ungrouped(o, s)
    return Attended(out, lse)


def partial_backward(dout, delta, lse, q, k, v, queries: Places, keys: Places, drop=None, step: int = 0):
    """dq, and dk and dv of the keys that are here.

    `lse` and `delta`, the row sums of dout * out, are those of the finished result over *all* keys; then each set of keys has its share
    of the gradient by itself and the shares of dq are added: no merge is differentiated.
    """
    scale, heads = q.shape[-1] ** -0.5, k.shape[2]
    dq = np.zeros_like(q)
    dk, dv = (np.zeros((x.shape[0], heads, x.shape[1], x.shape[3]), x.dtype) for x in (k, v))    # [B, K, T, E]
    for block in blocks(queries, keys, q.dtype):
        s = block.rows.stop - block.rows.start
        k_b, v_b = _keys(k, block.keys), _keys(v, block.keys)
        q_b, do = _grouped(q[:, block.rows] * scale, heads), _grouped(dout[:, block.rows], heads)
        p = _scores(q_b, k_b, block)
        p -= _grouped(finite(lse[:, block.rows])[..., None], heads)
        np.exp(p, out=p)                                                                # [B, K, g*s, t]
        ds = _product("attention dp", do, v_b.swapaxes(2, 3))
        kept = p
        if drop is not None:
            mask = _mask(drop, step, queries, keys, block, p.shape, p.dtype)
            kept = p * mask
            ds *= mask
        dv[:, :, block.keys] += _product("attention dv", kept.swapaxes(2, 3), do)
        ds -= _grouped(delta[:, block.rows][..., None], heads)
        ds *= p
        dk[:, :, block.keys] += _product("attention dk", ds.swapaxes(2, 3), q_b)
        dq_b = _product("attention dq", ds, k_b)
        dq_b *= scale
        dq[:, block.rows] = _ungrouped(dq_b, s)
    return dq, dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3)


def core(drop=None) -> Pair:
    """The filling of the seam `core` for one process.  `drop`: a mask of the probabilities as in `nn/dropout.py`, or None."""
    def forward(q, k, v, batch, before):
        after = extend(before, k, v, batch)
        attended = partial(q, after["k"], after["v"], places(batch), keys_of(after), drop, batch.step)
        out = finish(attended)
        return out, after, {"q": q, "after": after, "out": out, "lse": attended.lse}

    def backward(dout, dafter, saved, batch):
        after = saved["after"]
        delta = np.vecdot(dout, saved["out"])                                           # [B, S, H]
        dq, dk, dv = partial_backward(dout, delta, saved["lse"], saved["q"], after["k"], after["v"], places(batch), keys_of(after),
                                      drop, batch.step)
        return dq, *share_out(dk, dv, dafter, dq.shape[1])

    return Pair(forward, backward)
