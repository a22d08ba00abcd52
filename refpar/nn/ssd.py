"""The selective scan of `scan.py` in chunks of L tokens: nearly all of it matrix products (state space duality, SSD).

Within a chunk y is attention without a softmax, whose scores decay; from chunk to chunk only the state is handed on.  The terms
have the survey's names (section 5.1), and so have the ops that `watch` is told of, with c chunks of L tokens in a row:

    C B'                scores of the tokens of a chunk      2 B c L L G N    once per group; the survey repeats it for each head
    (C B' o decay) X    their outputs                        2 B c L L M P
    chunk states        what each chunk adds to the state    2 B c L M P N
    inter-chunk         the state from chunk to chunk        2 B c M P N      elementwise: no matrix product, but the survey's term
    C h                 outputs from the state               2 B c L M P N

Backward costs, in the same letters, 6 B c L L G N (C B' again, and two), 4 B c L L M P, 10 B c L M P N and 2 B c M P N.

Forward is two passes.  The first sums up each chunk, and the merge of all is what `carry` needs of my tokens; the second starts
from what lies before them.  Backward mirrors it from the other end, with the same merge.  The decay from token s to token t of a
document is exp(log[t] - log[s]), log the running sum of dt A: quotients of running products would overflow.  Only these sums
[B, S, M] are float64, and every difference is taken in float64, so strong decay costs no digits; they start anew with each
document, so its neighbour's values do not touch even their rounding.

Dao and Gu 2024 (Mamba-2), section 6.
"""
from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.nn.scan import Summary, merge, summary_of_state
from refpar.nn.seams import ALONE


class Chunk(NamedTuple):
    """The tokens of one chunk, and their decays."""
    X: np.ndarray               # [B, L, M, P]  dt x
    B: np.ndarray               # [B, L, G, N]
    C: np.ndarray               # [B, L, G, N]
    log: np.ndarray             # [B, L, M]     float64, the running sum of dt A
    position: np.ndarray        # [B, L]
    since_start: np.ndarray     # [B, L, M]     what is left at each token of the state before the chunk
    to_end: np.ndarray          # [B, L, M]     what is left of each token at the chunk's end


def ssd_forward(x, dt, B, C, A_log, position, before, chunk: int, carry=ALONE):
    """Shapes as in `oracle/naive.py` -> y, after, saved.  The last chunk may be shorter."""
    log = running_sum(dt * -np.exp(A_log.astype(np.float64)), position, chunk)     # [B, S, M] float64
    parts, chunks = chunks_of(x, dt, B, C, log, position, chunk)
    summaries = [summed_up(c, c.X * c.to_end[..., None], c.B) for c in chunks]
    nothing = summary_of_state(np.zeros_like(before))
    here, on = carry.forward(merge, reduce(merge, summaries, nothing), summary_of_state(before))
    y, starts = np.empty_like(x), np.empty((len(chunks), *before.shape), x.dtype)
    for i, c in enumerate(chunks):
        starts[i] = here.state                                                      # [B, M, P, N]
        y[:, parts[i]] = within_forward(c)
        y[:, parts[i]] += across_forward(c, here.state)
        watch.op("inter-chunk", 2 * here.state.size)
        here = merge(here, summaries[i])
    return y, on.state, {"x": x, "dt": dt, "B": B, "C": C, "log": log, "starts": starts}


def ssd_backward(dy, dafter, saved, A_log, position, chunk: int, carry=ALONE):
    """dy like y, dafter like after -> (dx, ddt, dB, dC), dbefore, dA_log."""
    x, dt, B, C, log, starts = (saved[name] for name in ("x", "dt", "B", "C", "log", "starts"))
    parts, chunks = chunks_of(x, dt, B, C, log, position, chunk)
    summaries = [summed_up(c, dy[:, part] * c.since_start[..., None], c.C) for part, c in zip(parts, chunks)]
    nothing = summary_of_state(np.zeros_like(dafter))
    here, on = carry.backward(merge, reduce(merge, reversed(summaries), nothing), summary_of_state(dafter))
    totals = dX, dB, dC, dlog = [np.zeros_like(array) for array in (x, B, C, log)]
    for i, c in reversed(list(enumerate(chunks))):
        for grads in (within_backward(dy[:, parts[i]], c), across_backward(dy[:, parts[i]], c, starts[i], here.state)):
            for total, grad in zip(totals, grads):
                total[:, parts[i]] += grad
        watch.op("inter-chunk", 2 * here.state.size)
        here = merge(here, summaries[i])
    A = -np.exp(A_log.astype(np.float64))
    ddA = running_sum_backward(dlog, position, chunk)                               # [B, S, M] float64
    ddt = (ddA * A + np.vecdot(dX, x)).astype(x.dtype)                              # [B, S, M]
    dA_log = np.vecdot(ddA, dt, axis=1).sum(0) * A
    return (dX * dt[..., None], ddt, dB, dC), on.state, dA_log.astype(x.dtype)


def chunks_of(x, dt, B, C, log, position, chunk: int) -> tuple[list[slice], list[Chunk]]:
    """Where the chunks of a row of S tokens lie, and the chunks; none of an empty row."""
    tokens = x.shape[1]
    parts = [slice(first, min(first + chunk, tokens)) for first in range(0, tokens, chunk)]
    arrays = x * dt[..., None], B, C, log, position
    cut = ([array[:, part] for array in arrays] for part in parts)
    return parts, [Chunk(*pieces, *decays(pieces[3], pieces[4], x.dtype)) for pieces in cut]


# ---------------------------------------------------------------------------------------------------------------- decay

def running_sum(dA, position, chunk: int):
    """dA [B, S, M] float64 -> its running sum, anew at each chunk, and from 0 where a document begins (there nothing decays: all is
    gone).  Token i of all chunks at once, for i = 1 to L-1."""
    goes_on = (position != 0).astype(dA.dtype)[..., None]                           # [B, S, 1]
    log = dA * goes_on
    for i in range(1, min(chunk, log.shape[1])):
        now = log[:, i::chunk]                                                      # [B, c, M]
        now += goes_on[:, i::chunk] * log[:, i - 1::chunk][:, :now.shape[1]]
    return log


def running_sum_backward(dlog, position, chunk: int):
    """The transpose: dlog [B, S, M] -> the gradient of dA, the sum over the later tokens of the chunk and document."""
    goes_on = (position != 0).astype(dlog.dtype)[..., None]
    ddA = dlog.copy()
    for i in reversed(range(1, min(chunk, ddA.shape[1]))):
        now = ddA[:, i::chunk]
        ddA[:, i - 1::chunk][:, :now.shape[1]] += goes_on[:, i::chunk] * now
    return ddA * goes_on


def decays(log, position, dtype):
    """log [B, L, M] and position [B, L] of a chunk -> since its start and to its end, [B, L, M]; 0 if a document begins between."""
    begun = np.cumsum(position == 0, axis=1)[..., None]                             # [B, L, 1]: documents begun in the chunk so far
    since_start = np.exp(log) * (begun == 0)
    to_end = np.exp(np.minimum(log[:, -1:] - log, 0)) * (begun == begun[:, -1:])    # above 0 from one document to another only
    return since_start.astype(dtype), to_end.astype(dtype)


def decay_between(log, position, dtype) -> np.ndarray:
    """The same from token s to token t, [B, M, L, L] in the order t, s: 0 where s is later or of another document."""
    length = position.shape[1]
    begun = np.cumsum(position == 0, axis=1)
    seen = (begun[:, :, None] == begun[:, None]) & np.tri(length, dtype=bool)       # [B, L, L]
    log = np.ascontiguousarray(log.transpose(0, 2, 1))                              # [B, M, L]
    decay = np.empty((*log.shape, length), dtype)                                   # [B, M, L, L]
    np.subtract(log[..., None], log[..., None, :], out=decay, casting="same_kind")
    decay += np.where(seen, 0, -np.inf).astype(dtype)[:, None]
    return np.exp(decay, out=decay)


# ---------------------------------------------------------------------------------------------------------------- products

def heads_first(x):
    """[B, L, M, P] -> [B, M, L, P], a view."""
    return x.transpose(0, 2, 1, 3)


def by_group(x, groups: int):
    """[B, L, M, P] -> [B, G, L, MP/G]: the heads of a group side by side, for one product with their B or C."""
    rows, length, heads, width = x.shape
    return heads_first(x.reshape(rows, length, groups, heads * width // groups))


def product(name: str, a, b):
    """Matrix product over the last two dims, counted under `name`: 2mnk each."""
    y = a @ b
    watch.op(name, 2 * y.size * a.shape[-1])
    return y


def summed_up(c: Chunk, x, B) -> Summary:
    """The summary of a chunk that adds the sum of x[t] B[t]' to the state; x [B, L, M, P], B [B, L, G, N]."""
    rows, _, heads, width = x.shape
    state = product("chunk states", by_group(x, B.shape[2]).swapaxes(2, 3), heads_first(B))     # [B, G, MP/G, N]
    return Summary(c.since_start[:, -1], state.reshape(rows, heads, width, B.shape[3]))


def read(name: str, state, C):
    """h C[t] for each token: state [B, M, P, N], C [B, L, G, N] -> [B, L, M, P]."""
    rows, heads, width, n = state.shape
    _, length, groups, _ = C.shape
    grouped = state.reshape(rows, groups, heads * width // groups, n).swapaxes(2, 3)
    y = product(name, heads_first(C), grouped)                                      # [B, G, L, MP/G]
    return heads_first(y).reshape(rows, length, heads, width)


def read_backward(name: str, x, state, groups: int):
    """Its gradient for C, of x [B, L, M, P]: h' x[t], summed over the heads of a group -> [B, L, G, N]."""
    rows, _, heads, width = x.shape
    grouped = state.reshape(rows, groups, heads * width // groups, state.shape[3])
    return heads_first(product(name, by_group(x, groups), grouped))


# ----------------------------------------------------------------------------------------------- y within a chunk: (C B' o decay) X

def in_groups(weights, scores):
    """weights [B, M, L, L] of heads, beside scores [B, G, L, L] of groups -> [B, G, M/G, L, L], a view."""
    rows, groups, length, _ = scores.shape
    return weights.reshape(rows, groups, weights.shape[1] // groups, length, length)


def within_forward(c: Chunk):
    """y [B, L, M, P] of the tokens of a chunk on one another."""
    scores = product("C B'", heads_first(c.C), heads_first(c.B).swapaxes(2, 3))     # [B, G, L, L]
    weights = decay_between(c.log, c.position, c.X.dtype)                           # [B, M, L, L]
    in_groups(weights, scores)[:] *= scores[:, :, None]
    return heads_first(product("(C B' o decay) X", weights, heads_first(c.X)))


def within_backward(dy, c: Chunk):
    """dy [B, L, M, P] -> the gradients of X, B, C, and of log in float64."""
    scores = product("C B'", heads_first(c.C), heads_first(c.B).swapaxes(2, 3))     # [B, G, L, L]
    decay = decay_between(c.log, c.position, c.X.dtype)                             # [B, M, L, L]
    dweights = product("(C B' o decay) X", heads_first(dy), heads_first(c.X).swapaxes(2, 3))    # [B, M, L, L]
    dweights *= decay
    dscores = in_groups(dweights, scores).sum(2)                                    # [B, G, L, L]
    weights = decay
    in_groups(weights, scores)[:] *= scores[:, :, None]
    in_groups(dweights, scores)[:] *= scores[:, :, None]        # from here on the gradient of log[t] - log[s]
    dlog = dweights.sum(3, dtype=np.float64) - dweights.sum(2, dtype=np.float64)    # [B, M, L]
    return (heads_first(product("(C B' o decay) X", weights.swapaxes(2, 3), heads_first(dy))),
            heads_first(product("C B'", dscores.swapaxes(2, 3), heads_first(c.C))),
            heads_first(product("C B'", dscores, heads_first(c.B))), dlog.transpose(0, 2, 1))


# ------------------------------------------------------------------------------------------- y from the state, and the state's end

def across_forward(c: Chunk, start):
    """y [B, L, M, P] of the state `start` [B, M, P, N] before the chunk."""
    y = read("C h", start, c.C)
    y *= c.since_start[..., None]
    return y


def across_backward(dy, c: Chunk, start, dend):
    """dy [B, L, M, P], and the gradient of the state after the chunk, `dend` [B, M, P, N] -> the gradients of X, B, C and log."""
    groups = c.B.shape[2]
    dC = read_backward("C h", dy * c.since_start[..., None], start, groups)
    dB = read_backward("chunk states", c.X * c.to_end[..., None], dend, groups)
    dX = read("chunk states", dend, c.B)                                            # [B, L, M, P]
    dX *= c.to_end[..., None]
    dlog = np.vecdot(dy, across_forward(c, start)).astype(np.float64)               # [B, L, M]: y grows with log[t]
    left = np.vecdot(c.X, dX)                                                       # the end grows with log[end] - log[t]
    dlog -= left
    kept = np.einsum("bmpn,bmpn->bm", start, dend) * c.since_start[:, -1]           # [B, M]: what it keeps of start, with log[end]
    dlog[:, -1] += left.sum(1, dtype=np.float64) + kept
    return dX, dB, dC, dlog
