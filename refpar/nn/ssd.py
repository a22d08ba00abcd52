"""The selective scan of `scan.py` in chunks of L tokens: nearly all of it matrix products (state space duality, SSD).

Within a chunk y is attention without a softmax, whose scores decay; from chunk to chunk only the state is handed on.  The terms
have the survey's names (section 5.1), and so have the ops that `watch` is told of, with c chunks of L tokens in a row:

    C B'                scores of the tokens of a chunk      2 B c L L G N    once per group; the survey repeats it for each head
    (C B' o decay) X    their outputs                        2 B c L L M P
    chunk states        what each chunk adds to the state    2 B c L M P N
    inter-chunk         the state from chunk to chunk        2 B c M P N      elementwise: no matrix product, but the survey's term
    C h                 outputs from the state               2 B c L M P N

Backward costs, in the same letters, 6 B c L L G N (C B' again, and two), 4 B c L L M P, 10 B c L M P N and 2 B c M P N.

Forward is two passes.  The first sums up each chunk, and the merge of all is what `carry` needs of my tokens; the second starts from
what lies before them.  Backward mirrors it from the other end, with the same merge.  The decay from token s to token t of a document
is exp(log[t] - log[s]), log the running sum of dt A: quotients of running products would overflow.  Only these sums [B, S, M] are
float64, and every difference is taken in float64, so strong decay costs no digits; they start anew with each document, so
its neighbour's values do not touch even their rounding.

Dao and Gu 2024 (Mamba-2), section 6.
"""
from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.nn.scan import Summary, merge, summary_of_state
from refpar.nn.seams import ALONE


class Decay(NamedTuple):
    """How much is left of the state before the chunk at each token, and of each token at the chunk's end; both [B, L, M]."""
    since_start: np.ndarray
    to_end: np.ndarray


def ssd_forward(x, dt, B, C, w, position, before, chunk: int, carry=ALONE):
    """Shapes as in `scan_forward` -> y, after, saved.  The last chunk may be shorter."""
    dA = dt * -np.exp(w["A_log"].astype(np.float64))
    log = running_sum(dA, position, chunk)                                          # [B, S, M] float64
    parts = chunks_of(x.shape[1], chunk)
    summaries = [chunk_state(*cut(part, x, dt, B, log, position)) for part in parts]
    nothing = summary_of_state(np.zeros_like(before))
    here, on = carry.forward(merge, reduce(merge, summaries, nothing), summary_of_state(before))
    y, starts = w["skip"][:, None] * x, np.empty((len(parts), *before.shape), x.dtype)
    for i, (part, summary) in enumerate(zip(parts, summaries)):
        starts[i] = here.state                                                      # [B, M, P, N]
        y[:, part] += chunk_output(*cut(part, x, dt, B, C, log, position), here.state)
        watch.op("inter-chunk", 2 * here.state.size)
        here = merge(here, summary)
    return y, on.state, {"x": x, "dt": dt, "B": B, "C": C, "log": log, "starts": starts}


def ssd_backward(dy, dafter, saved, w, position, chunk: int, carry=ALONE):
    """dy like y, dafter like after -> (dx, ddt, dB, dC), dbefore, grads of A_log and skip."""
    x, dt, B, C, log = (saved[name] for name in ("x", "dt", "B", "C", "log"))
    A = -np.exp(w["A_log"].astype(np.float64))
    parts = chunks_of(x.shape[1], chunk)
    summaries = [chunk_read(*cut(part, dy, C, log, position)) for part in parts]
    nothing = summary_of_state(np.zeros_like(dafter))
    here, on = carry.backward(merge, reduce(merge, reversed(summaries), nothing), summary_of_state(dafter))
    dX, dB, dC, dlog = np.empty_like(x), np.empty_like(B), np.empty_like(C), np.empty_like(log)
    for part, summary, start in reversed(list(zip(parts, summaries, saved["starts"]))):
        dX[:, part], dB[:, part], dC[:, part], dlog[:, part] = chunk_backward(
            *cut(part, dy, x, dt, B, C, log, position), start, here.state)
        watch.op("inter-chunk", 2 * start.size)
        here = merge(here, summary)
    ddA = running_sum_backward(dlog, position, chunk)                               # [B, S, M] float64
    ddt = ddA * A
    ddt += np.vecdot(dX, x)
    dx = dX * dt[..., None]
    dx += w["skip"][:, None] * dy
    grads = {"A_log": np.vecdot(ddA, dt, axis=1).sum(0) * A, "skip": np.vecdot(dy, x).sum((0, 1))}
    return (dx, ddt.astype(x.dtype), dB, dC), on.state, {name: grad.astype(x.dtype) for name, grad in grads.items()}


def chunks_of(tokens: int, chunk: int) -> list[slice]:
    """The chunks of a row of S tokens; none of an empty row."""
    return [slice(first, min(first + chunk, tokens)) for first in range(0, tokens, chunk)]


def cut(part: slice, *arrays):
    """These tokens of every array [B, S, ...]."""
    return [array[:, part] for array in arrays]


# ---------------------------------------------------------------------------------------------------------------- decay

def running_sum(dA, position, chunk: int):
    """dA [B, S, M] float64 -> its running sum, anew at each chunk, and from 0 where a document begins (there nothing decays: all is
    gone).  Token l of all chunks at once, for l = 1 to L-1."""
    goes_on = (position != 0).astype(dA.dtype)[..., None]                           # [B, S, 1]
    log = dA * goes_on
    for l in range(1, min(chunk, log.shape[1])):
        now = log[:, l::chunk]                                                      # [B, c, M]
        now += goes_on[:, l::chunk] * log[:, l - 1::chunk][:, :now.shape[1]]
    return log


def running_sum_backward(dlog, position, chunk: int):
    """The transpose: dlog [B, S, M] -> the gradient of dA, the sum over the later tokens of the chunk and document."""
    goes_on = (position != 0).astype(dlog.dtype)[..., None]
    ddA = dlog.copy()
    for l in reversed(range(1, min(chunk, ddA.shape[1]))):
        now = ddA[:, l::chunk]
        ddA[:, l - 1::chunk][:, :now.shape[1]] += goes_on[:, l::chunk] * now
    return ddA * goes_on


def decay_of(log, position, dtype) -> Decay:
    """log [B, L, M] and position [B, L] of one chunk -> its decays: 0 across the beginning of a document."""
    begun = np.cumsum(position == 0, axis=1)[..., None]                             # [B, L, 1]: documents begun in this chunk so far
    since_start = np.exp(log) * (begun == 0)
    to_end = np.exp(np.minimum(log[:, -1:] - log, 0)) * (begun == begun[:, -1:])   # above 0 from one document to another only
    return Decay(since_start.astype(dtype), to_end.astype(dtype))


def decay_between(log, position, dtype) -> np.ndarray:
    """The same from token s to token t, [B, M, L (t), L (s)]: 0 where s is later or of another document."""
    length = position.shape[1]
    begun = np.cumsum(position == 0, axis=1)
    seen = (begun[:, :, None] == begun[:, None]) & np.tri(length, dtype=bool)       # [B, L, L]
    log = np.ascontiguousarray(log.transpose(0, 2, 1))                              # [B, M, L]
    decay = np.empty((*log.shape, length), dtype)                                   # [B, M, L, L]
    np.subtract(log[..., None], log[..., None, :], out=decay, casting="same_kind")
    decay += np.where(seen, 0, -np.inf).astype(dtype)[:, None]
    return np.exp(decay, out=decay)


# ---------------------------------------------------------------------------------------------------------------- one chunk

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


def state_of(name: str, x, B):
    """sum over the chunk of x[t] B[t]': x [B, L, M, P], B [B, L, G, N] -> [B, M, P, N]."""
    rows, _, heads, width = x.shape
    return product(name, by_group(x, B.shape[2]).swapaxes(2, 3), heads_first(B)).reshape(rows, heads, width, B.shape[3])


def read(name: str, state, C):
    """h C[t] for each token: state [B, M, P, N], C [B, L, G, N] -> [B, L, M, P]."""
    rows, heads, width, n = state.shape
    _, length, groups, _ = C.shape
    by_state = state.reshape(rows, groups, heads * width // groups, n).swapaxes(2, 3)
    y = product(name, heads_first(C), by_state)                                     # [B, G, L, MP/G]
    return heads_first(y).reshape(rows, length, heads, width)


def chunk_state(x, dt, B, log, position) -> Summary:
    """First pass: the state that a chunk leaves behind, had it begun with none, and what is left of the state before it."""
    decay = decay_of(log, position, x.dtype)
    X = x * (dt * decay.to_end)[..., None]                                          # [B, L, M, P]
    return Summary(decay.since_start[:, -1], state_of("chunk states", X, B))


def chunk_output(x, dt, B, C, log, position, start):
    """Second pass: y [B, L, M, P] of a chunk that begins with the state `start` [B, M, P, N]."""
    rows, length, heads, width = x.shape
    groups = B.shape[2]
    y = read("C h", start, C)                                                       # [B, L, M, P]
    y *= decay_of(log, position, x.dtype).since_start[..., None]
    scores = product("C B'", heads_first(C), heads_first(B).swapaxes(2, 3))         # [B, G, L, L]
    between = decay_between(log, position, x.dtype)                                 # [B, M, L, L]
    between.reshape(rows, groups, heads // groups, length, length)[:] *= scores[:, :, None]
    y += heads_first(product("(C B' o decay) X", between, heads_first(x * dt[..., None])))
    return y


def chunk_read(dy, C, log, position) -> Summary:
    """First pass of backward: the gradient of the chunk's first state, had nobody used its last, and what that one's is multiplied by."""
    decay = decay_of(log, position, dy.dtype)
    return Summary(decay.since_start[:, -1], state_of("chunk states", dy * decay.since_start[..., None], C))


def chunk_backward(dy, x, dt, B, C, log, position, start, dend):
    """dy [B, L, M, P] of a chunk, its first state and the gradient of its last, both [B, M, P, N]
    -> the gradients of X = dt x, of B, of C, and of log in float64."""
    rows, length, heads, width = x.shape
    groups = B.shape[2]
    grouped = rows, groups, heads // groups, length, length
    decay = decay_of(log, position, x.dtype)
    X = x * dt[..., None]                                                           # [B, L, M, P]

    # y = ... + since_start C start, and end = ... + to_end X B'
    from_state = read("C h", start, C)
    from_state *= decay.since_start[..., None]
    into_state = read("chunk states", dend, B)
    into_state *= decay.to_end[..., None]
    dC = read_by_group("C h", dy * decay.since_start[..., None], start, groups)
    dB = read_by_group("chunk states", X * decay.to_end[..., None], dend, groups)

    # y = (C B' o decay) X + ...
    scores = product("C B'", heads_first(C), heads_first(B).swapaxes(2, 3))         # [B, G, L, L]
    dbetween = product("(C B' o decay) X", heads_first(dy), heads_first(X).swapaxes(2, 3))      # [B, M, L, L]
    between = decay_between(log, position, x.dtype)
    dbetween *= between
    dscores = dbetween.reshape(grouped).sum(2)                                      # [B, G, L, L]
    between.reshape(grouped)[:] *= scores[:, :, None]
    dX = into_state + heads_first(product("(C B' o decay) X", between.swapaxes(2, 3), heads_first(dy)))
    dC += heads_first(product("C B'", dscores, heads_first(B)))
    dB += heads_first(product("C B'", dscores.swapaxes(2, 3), heads_first(C)))

    # the logarithms: decay[t, s] = exp(log[t] - log[s])
    dbetween.reshape(grouped)[:] *= scores[:, :, None]
    dlog = (dbetween.sum(3, dtype=np.float64) - dbetween.sum(2, dtype=np.float64)).transpose(0, 2, 1)
    dlog += np.vecdot(dy, from_state)
    end = np.vecdot(X, into_state).astype(np.float64)                               # [B, L, M]
    dlog -= end
    kept = np.einsum("bmpn,bmpn->bm", start, dend) * decay.since_start[:, -1]       # [B, M]
    dlog[:, -1] += end.sum(1) + kept
    return dX, dB, dC, dlog


def read_by_group(name: str, x, state, groups: int):
    """sum over the heads of a group of x[t]' h: x [B, L, M, P], state [B, M, P, N] -> [B, L, G, N]."""
    rows, _, heads, width = x.shape
    stacked = state.reshape(rows, groups, heads * width // groups, state.shape[3])
    return heads_first(product(name, by_group(x, groups), stacked))
