"""The causal depthwise conv of Mamba: each channel mixes its own last W tokens.

    y[t] = bias + sum over k of w[k] x[t-k], where tap k counts iff position[t] >= k

so no tap reaches into the document before, and a token needs only its own position to know.  What lies before the first token
is the last W-1 inputs, `before` [B, W-1, C]; what is left behind is the last W-1 of before and x together.

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
    """What a run of tokens leaves behind: how many they are, int64 [], and their last inputs [B, W-1, C], zeros where too few."""
    count: np.ndarray
    rows: np.ndarray


def tail_of(x, reach: int) -> Tail:
    """Partial: x [B, S, C] -> the tail of these S tokens.  Identity of the merge: the tail of no tokens."""
    tokens = x.shape[1]
    kept = min(tokens, reach)
    rows = np.zeros((x.shape[0], reach, x.shape[2]), x.dtype)                       # [B, W-1, C]
    rows[:, reach - kept:] = x[:, tokens - kept:]
    return Tail(np.array(tokens), rows)


def tail_merge(first: Tail, second: Tail) -> Tail:
    """Merge: the tail of both runs.  The inputs of the first move out by as many places as the second has tokens."""
    rows = second.rows.copy()
    reach = rows.shape[1]
    gone = min(int(second.count), reach)
    rows[:, :reach - gone] += first.rows[:, gone:]
    return Tail(first.count + second.count, rows)


def tail_merge_backward(later: Tail, own: Tail) -> Tail:
    """The transpose of `tail_merge`, for gradients, which come from the other end: they move in again."""
    rows = own.rows.copy()
    reach = rows.shape[1]
    gone = min(int(own.count), reach)
    rows[:, gone:] += later.rows[:, :reach - gone]
    return Tail(later.count + own.count, rows)


def windows(padded, taps: int):
    """padded [B, W-1+S, C] -> a view [B, S, W, C]: what token t sees k tokens back."""
    rows, length, channels = padded.shape
    row, token, channel = padded.strides
    tokens = length - taps + 1
    return as_strided(padded[:, taps - 1:], (rows, tokens, taps, channels), (row, token, -token, channel), writeable=False)


def conv_forward(x, w, bias, position, before, carry=ALONE):
    """x [B, S, C], w [W, C], bias [C], position [B, S], before [B, W-1, C] -> y [B, S, C], after [B, W-1, C], saved."""
    taps = len(w)
    here, on = carry.forward(tail_merge, tail_of(x, taps - 1), Tail(np.array(0), before))
    padded = np.concatenate([here.rows, x], axis=1)                                 # [B, W-1+S, C]
    seen = windows(padded, taps)                                                    # [B, S, W, C]
    y = np.einsum("bskc,kc->bsc", seen, w)                                          # [B, S, C]
    early = np.nonzero(position < taps - 1)         # the few tokens that see fewer than W: again, less the taps that do not count
    counts = position[early][:, None] >= np.arange(taps)                            # [T early, W]
    y[early] = np.einsum("tkc,kc->tc", seen[early] * counts[..., None], w)
    y += bias
    return y, on.rows, {"padded": padded}


def conv_backward(dy, dafter, saved, w, position, carry=ALONE):
    """dy [B, S, C], dafter [B, W-1, C] -> dx, dbefore, and the gradients of w and bias.

    The transpose of a conv is the conv that looks ahead: dx[t] = sum over k of w[k] dy[t+k], where t+k counts its tap k.
    """
    padded, taps, tokens = saved["padded"], len(w), dy.shape[1]
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
    own, given = Tail(np.array(tokens), dpadded[:, :taps - 1]), Tail(np.array(0), dafter)
    here, on = carry.backward(tail_merge_backward, own, given)
    dpadded[:, tokens:] += here.rows            # my last inputs are also what others see before their tokens
    return dpadded[:, taps - 1:], on.rows, dw, dy.sum((0, 1))
