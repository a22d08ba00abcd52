"""Attention in blocks of queries, all heads at once: the fast form of `nn/attention.py`.

A block of scores fits the cache, keys after a block's last query are never touched, and backward computes the probabilities again
from the saved log-sum-exp, so memory grows with the tokens and not with their square (Dao et al. 2022).

Attention over *some* keys is a partial result, (out, lse): the softmax average of the values, and the log of the sum that it was
divided by.  Two such results of the same queries merge into that of both sets of keys, in any order and nesting; no keys at all
give the identity, (0, -inf).  Rings of ranks and split decoding differ only in who merges when.
"""
from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.nn.attention import EVERYTHING, Places, extend, keys_of, places, share_out, visible
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
    """The queries [rows, queries] look at the keys [rows, keys]; `bias` [B', s, c], 0 or -inf, is added on `hiding`, the part of
    those keys where something may be hidden."""
    rows: slice
    queries: slice
    keys: slice
    hiding: slice
    bias: np.ndarray


ELEMENTS = 1 << 18              # scores of a block, at most: two such arrays, for backward, live in the cache


def block_size(queries: int) -> int:
    """Queries in a block.  Measured: shorter blocks waste less on hidden keys, longer ones make better matrix products."""
    return 64 if queries <= 512 else 128


def blocks(queries: Places, keys: Places, heads: int, dtype, window: int = EVERYTHING):
    """Cut the rows and the queries into blocks, and find for each the span of keys that any of its queries may see."""
    rows, tokens = queries.position.shape
    size = block_size(tokens)
    together = max(1, ELEMENTS // max(1, heads * size * keys.position.shape[1]))
    for row in range(0, rows, together):
        for token in range(0, tokens, size):
            part = slice(row, min(row + together, rows)), slice(token, min(token + size, tokens))
            yield _block(part, Places(*(place[part] for place in queries)), Places(*(place[part[0]] for place in keys)), dtype,
                         window)


def remembering(answers: int = 1):
    """`blocks` as a list, with a memory of its last answers: every layer of a model asks the same of a batch, forward and backward
    (and a ring of ranks once for each rank)."""
    memory = deque(maxlen=answers)

    def plan(queries: Places, keys: Places, *kind) -> list[Block]:
        asked = *queries, *keys
        for known, arrays, found in memory:
            if known == kind and all(map(np.array_equal, asked, arrays)):
                return found
        memory.append((kind, asked, list(blocks(queries, keys, *kind))))
        return memory[-1][2]
    return plan


def _block(part, queries: Places, keys: Places, dtype, window: int) -> Block:
    """Bounds of the queries' documents and positions say of a key at once that some query may, or that every query must, see it;
    only between the two is each pair looked at."""
    low, high = (bound(queries.document, axis=1, keepdims=True) for bound in (np.min, np.max))      # [B', 1]
    early, late = (bound(queries.position, axis=1, keepdims=True) for bound in (np.min, np.max))    # [B', 1]
    may = (keys.document >= low) & (keys.document <= high) & (keys.position <= late) & (early - keys.position < window)
    span = _span(may.any(axis=0))
    keys = Places(*(place[:, span] for place in keys))
    must = (low == high) & (keys.document == low) & (keys.position <= early) & (late - keys.position < window)
    hiding = _span(~must.all(axis=0))
    seen = visible(queries, Places(*(place[:, hiding] for place in keys)), window)                  # [B', s, c]
    return Block(*part, span, hiding, np.where(seen, 0, -np.inf).astype(dtype))


def _span(flags) -> slice:
    """From the first to the last true flag."""
    true = np.flatnonzero(flags)
    return slice(int(true[0]), int(true[true.size - 1]) + 1) if true.size else slice(0, 0)


# ------------------------------------------------------------------------------ one block: heads grouped by the key head they share

def _grouped(x, heads: int):
    """x [B, s, H, E] -> [B, K, g*s, E]: the queries of all g heads of a group become rows of one product."""
    rows, tokens, _, width = x.shape
    group = x.shape[2] // max(heads, 1)
    x = x.reshape(rows, tokens, heads, group, width).transpose(0, 2, 3, 1, 4)
    return x.reshape(rows, heads, group * tokens, width)


def _ungrouped(x, tokens: int):
    """[B, K, g*s, ...] -> [B, s, H, ...]."""
    rows, heads, both, *rest = x.shape
    group = both // tokens
    x = x.reshape(rows, heads, group, tokens, *rest).transpose(0, 3, 1, 2, *range(4, 4 + len(rest)))
    return x.reshape(rows, tokens, heads * group, *rest)


def _keys(x, block: Block):
    """x [B, T, K, E] -> [B', K, t, E], a view."""
    return x[block.rows, block.keys].transpose(0, 2, 1, 3)


def _product(name: str, a, b):
    """One matrix product for each row and key head, [B', K, m, k] [B', K, k, n]."""
    watch.op(name, 2 * a.size * b.shape[3])
    return a @ b


def _scores(q, k, block: Block):
    """q [B', K, g*s, E], k [B', K, t, E] -> [B', K, g*s, t], -inf where hidden."""
    scores = _product("attention scores", q, k.swapaxes(2, 3))
    rows, heads, both, keys = scores.shape
    tokens = block.bias.shape[1]
    split = scores.reshape(rows, heads, both // tokens, tokens, keys)
    split[..., block.hiding] += block.bias[:, None, None]
    return scores


def _mask(drop, step, queries: Places, keys: Places, block: Block, p):
    """The dropout of a block's probabilities p, in their grouped shape."""
    heads = p.shape[1] * p.shape[2] // block.bias.shape[1]
    return drop(step, queries.index[block.rows, block.queries], heads, keys.index[block.rows, block.keys], p.dtype).reshape(p.shape)


# ------------------------------------------------------------------------------------------------------------ over any set of keys

def partial(q, k, v, queries: Places, keys: Places, drop=None, step: int = 0, window: int = EVERYTHING,
            plan=blocks) -> Attended:
    """Attention of q [B, S, H, E] over the keys k, v [B, T, K, E] that are here."""
    out, lse = identity(q)
    for block in plan(queries, keys, q.shape[2], q.dtype, window):
        mine, tokens = (block.rows, block.queries), block.bias.shape[1]
        p = _scores(_grouped(q[mine] * q.shape[3] ** -0.5, k.shape[2]), _keys(k, block), block)     # [B', K, g*s, t]
        top = finite(p.max(axis=-1, keepdims=True, initial=-np.inf))
        p -= top
        np.exp(p, out=p)
        total = p @ np.ones(p.shape[-1], p.dtype)                                       # at least exp(0) = 1 where a key is seen
        with np.errstate(divide="ignore"):
            lse[mine] = _ungrouped(top[..., 0] + np.log(total), tokens)
        if drop is not None:
            p *= _mask(drop, step, queries, keys, block, p)
        o = _product("attention values", p, _keys(v, block))                            # [B', K, g*s, E]
        o /= np.maximum(total, 1)[..., None]
        out[mine] = _ungrouped(o, tokens)
    return Attended(out, lse)


def partial_backward(dout, delta, lse, q, k, v, queries: Places, keys: Places, drop=None, step: int = 0, window: int = EVERYTHING,
                     plan=blocks):
    """dq, and dk and dv of the keys that are here.

    `lse` and `delta`, the row sums of dout * out, are those of the finished result over *all* keys; then each set of keys has its
    share of the gradient by itself, and the shares of dq are added: no merge is differentiated.
    """
    scale, heads = q.shape[3] ** -0.5, k.shape[2]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for block in plan(queries, keys, q.shape[2], q.dtype, window):
        mine, tokens = (block.rows, block.queries), block.bias.shape[1]
        k_b, v_b = _keys(k, block), _keys(v, block)
        q_b, do = _grouped(q[mine] * scale, heads), _grouped(dout[mine], heads)         # [B', K, g*s, E]
        p = _scores(q_b, k_b, block)
        p -= _grouped(finite(lse[mine])[..., None], heads)
        np.exp(p, out=p)                                                                # [B', K, g*s, t]
        ds = _product("attention dp", do, v_b.swapaxes(2, 3))
        kept = p
        if drop is not None:
            mask = _mask(drop, step, queries, keys, block, p)
            kept = p * mask
            ds *= mask
        _keys(dv, block)[...] += _product("attention dv", kept.swapaxes(2, 3), do)
        ds -= _grouped(delta[mine][..., None], heads)
        ds *= p
        _keys(dk, block)[...] += _product("attention dk", ds.swapaxes(2, 3), q_b)
        dq_b = _product("attention dq", ds, k_b)
        dq_b *= scale
        dq[mine] = _ungrouped(dq_b, tokens)
    return dq, dk, dv


def core(drop=None, window: int = EVERYTHING, plan=blocks) -> Pair:
    """The filling of the seam `core` for one process.  `drop`: a mask of the probabilities as in `nn/dropout.py`, or None."""
    def forward(q, k, v, batch, before):
        after = extend(before, k, v, batch)
        attended = partial(q, after["k"], after["v"], places(batch), keys_of(after), drop, batch.step, window,
                           plan)
        out = finish(attended)
        return out, after, {"q": q, "after": after, "out": out, "lse": attended.lse}

    def backward(dout, dafter, saved, batch):
        after = saved["after"]
        delta = np.vecdot(dout, saved["out"])                                           # [B, S, H]
        dq, dk, dv = partial_backward(dout, delta, saved["lse"], saved["q"], after["k"], after["v"], places(batch), keys_of(after),
                                      drop, batch.step, window, plan)
        return dq, *share_out(dk, dv, dafter, dq.shape[1])

    return Pair(forward, backward)
