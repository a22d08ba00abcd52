"""The causal depthwise conv of Mamba: each channel mixes its own last W tokens.

    y[t] = bias + sum over k of w[k] x[t-k], where tap k counts iff position[t] >= k

so no tap reaches into the document before, and a token needs only its own position to know.  What lies before the first token
is the last W-1 inputs, `before` [B, W-1, C]; what is left behind is the last W-1 of before and x together.

Pads (position -1) are no inputs, wherever they stand: the conv works on each row with its tokens first, in their order, and its
pads last, where no token and no tail reaches them.  A row counts its own tokens, so a tail knows how far it moves the one before.

Law 5's three functions: the partial of a run of tokens is its `Tail`, `tail_merge` puts one run behind another, finishing is the
sum above.  A tail has the same shape for every run, long, short or empty, so that ranks can exchange it.  The merge is a scan's,
with a shift in the place of the decay: it is linear, and its transpose shifts the other way.

Dao and Gu 2024 (Mamba-2), section 7; W is 4 in all published models.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from refpar.nn.seams import ALONE


class Tail(NamedTuple):
    """What a run of tokens leaves behind: how many they are in each row, int64 [B], and their last inputs [B, W-1, C], zeros
    where too few."""
    count: np.ndarray
    rows: np.ndarray


def tail_of(x, reach: int, count) -> Tail:
    """Partial: x [B, S, C] -> the tail of the first `count` [B] tokens of each row.  Identity of the merge: that of no tokens."""
    rows = np.zeros((x.shape[0], reach, x.shape[2]), x.dtype)                       # [B, W-1, C]
    source = count[:, None] - reach + np.arange(reach)                              # [B, W-1]
    row, place = np.nonzero(source >= 0)
    rows[row, place] = x[row, source[row, place]]
    return Tail(count, rows)


def nothing_behind(rows) -> Tail:
    """Inputs that are given, [B, W-1, C], as the tail of no tokens."""
    return Tail(np.zeros(len(rows), np.int64), rows)


def tail_merge(first: Tail, second: Tail) -> Tail:
    """Merge: the tail of both runs.  The inputs of the first move out by as many places as the second has tokens."""
    return Tail(first.count + second.count, second.rows + _moved(first.rows, second.count))


def tail_merge_backward(later: Tail, own: Tail) -> Tail:
    """The transpose of `tail_merge`, for gradients, which come from the other end: they move in again."""
    return Tail(later.count + own.count, own.rows + _moved(later.rows, -own.count))


def _moved(rows, by):
    """Each row's [W-1, C] moved to the front by so many places, or to the back; zeros follow."""
    reach = rows.shape[1]
    source = np.arange(reach) + by[:, None]                                         # [B, W-1]
    zeros = np.pad(rows, ((0, 0), (0, 1), (0, 0)))                                  # [B, W, C]
    return zeros[_each_row(by), np.where((source >= 0) & (source < reach), source, reach)]


def _each_row(count):
    return np.arange(len(count))[:, None]


def tokens_first(position):
    """An index of [B, S]: each row's tokens in their order, then its pads.  Where there are no pads, everything as it is."""
    if (position >= 0).all():
        return ...
    return _each_row(position), np.argsort(position < 0, axis=1, kind="stable")


def put_back(x, order):
    """The inverse of x[order]."""
    y = np.empty_like(x)
    y[order] = x
    return x if order is ... else y


def windows(padded, taps: int):
    """padded [B, W-1+S, C] -> a view [B, S, W, C]: what token t sees k tokens back."""
    rows, length, channels = padded.shape
    row, token, channel = padded.strides
    tokens = length - taps + 1
    return as_strided(padded[:, taps - 1:], (rows, tokens, taps, channels), (row, token, -token, channel), writeable=False)


def conv_forward(x, w, bias, position, before, carry=ALONE):
    """x [B, S, C], w [W, C], bias [C], position [B, S], before [B, W-1, C] -> y [B, S, C], after [B, W-1, C], saved."""
    taps, order = len(w), tokens_first(position)
    x, position = x[order], position[order]
    own = tail_of(x, taps - 1, (position >= 0).sum(1))
    here, on = carry.forward(tail_merge, own, nothing_behind(before))
    padded = np.concatenate([here.rows, x], axis=1)                                 # [B, W-1+S, C]
    seen = windows(padded, taps)                                                    # [B, S, W, C]
    y = np.einsum("bskc,kc->bsc", seen, w)                                          # [B, S, C]
    early = np.nonzero(position < taps - 1)         # the few tokens that see fewer than W: again, less the taps that do not count
    counts = position[early][:, None] >= np.arange(taps)                            # [T early, W]
    y[early] = np.einsum("tkc,kc->tc", seen[early] * counts[..., None], w)
    y += bias
    return put_back(y, order), on.rows, {"padded": padded}


def conv_backward(dy, dafter, saved, w, position, carry=ALONE):
    """dy [B, S, C], dafter [B, W-1, C] -> dx, dbefore, and the gradients of w and bias.

    The transpose of a conv is the conv that looks ahead: dx[t] = sum over k of w[k] dy[t+k], where t+k counts its tap k.
    """
    padded, taps, tokens, order = saved["padded"], len(w), dy.shape[1], tokens_first(position)
    dy, position = dy[order], position[order]
    early = np.nonzero(position < taps - 1)
    late = np.pad(dy, ((0, 0), (taps - 1, taps - 1), (0, 0)))                       # [B, W-1+S+W-1, C]
    late[early[0], early[1] + taps - 1] = 0
    dpadded = np.einsum("bskc,kc->bsc", windows(late, taps), w[::-1])               # [B, W-1+S, C]
    dw = np.empty_like(w)
    for k in range(taps):
        dw[k] = np.einsum("bsc,bsc->c", late[:, taps - 1:taps - 1 + tokens], padded[:, taps - 1 - k:taps - 1 - k + tokens])
        row, t = (index[position[early] >= k] for index in early)
        dpadded[row, t + taps - 1 - k] += dy[row, t] * w[k]
        dw[k] += np.einsum("tc,tc->c", dy[row, t], padded[row, t + taps - 1 - k])
    count = (position >= 0).sum(1)
    here, on = carry.backward(tail_merge_backward, Tail(count, dpadded[:, :taps - 1].copy()), nothing_behind(dafter))
    last = _each_row(count), count[:, None] + np.arange(taps - 1)
    dpadded[last] += here.rows                  # my last inputs are also what others see before their tokens
    return put_back(dpadded[:, taps - 1:], order), on.rows, dw, dy.sum((0, 1))
