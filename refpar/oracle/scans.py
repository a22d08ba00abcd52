"""Forms of one recurrence, h[t] = a[t] h[t-1] + b[t], element by element: which order of work, which depth, which range.

    form            steps one after another     multiplications for each element, S tokens
    sequential      S                           1
    chunked         L + S/L                     about 3: L steps for all chunks at once, then S/L from chunk to chunk
    doubling        log S                       2 log S                             (Hillis and Steele 1986)
    tree            2 log S                     about 4: pairs merge, and their result is handed down      (Blelloch 1990)
    quotient        S, of cumprod and cumsum    2, but only while no running product of a underflows

All but the first are built on the merge of two runs, (a, b) then (a', b'): (a' a, a' b + b').  Chunks and trees are what ranks
and many cores do; on one core the sequential form wins, for the others do more work on arrays too large for the cache.

`selective(form)` is Mamba-1's scan by a form, forward and backward: backward is the same recurrence from the other end.

a, b, h: [S, ...]; start [...].
"""
from __future__ import annotations

from typing import Callable

import numpy as np

from refpar.nn.seams import Pair
from refpar.nn.selective import decay_of, rates


def sequential(a, b, start) -> np.ndarray:
    """The meaning: token by token."""
    h = np.empty_like(b)
    for t in range(len(b)):
        h[t] = a[t] * start + b[t]
        start = h[t]
    return h


def chunked(a, b, start, chunk: int = 16) -> np.ndarray:
    """All chunks at once from nothing, token by token; then what each is handed by the ones before."""
    tokens, rest = len(b), -len(b) % chunk
    a, h = (np.concatenate([array, np.zeros((rest, *array.shape[1:]), array.dtype)]) for array in (a, b))
    shape = (len(h) // chunk, chunk, *h.shape[1:])
    decay, h = a.reshape(shape), h.reshape(shape)                                   # [c, L, ...]
    for t in range(1, chunk):
        h[:, t] += decay[:, t] * h[:, t - 1]
        decay[:, t] *= decay[:, t - 1]                          # what is left of the state before the chunk
    for i in range(len(h)):
        h[i] += decay[i] * start
        start = h[i, chunk - 1]
    return h.reshape(shape[0] * chunk, *shape[2:])[:tokens]


def doubling(a, b, start) -> np.ndarray:
    """Every token merges with the run that ends 1, 2, 4, ... tokens before it."""
    a, h, reach = a.copy(), b.copy(), 1
    h[:1] += a[:1] * start
    while reach < len(h):
        h[reach:] += a[reach:] * h[:len(h) - reach]
        a[reach:] *= a[:len(a) - reach].copy()
        reach *= 2
    return h


def tree(a, b, start) -> np.ndarray:
    """Neighbours merge into half as many runs, whose states are those of every other token; the tokens between follow them."""
    if len(b) <= 1:
        return a * start + b
    h, pairs = np.empty_like(b), len(b) // 2
    first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    h[second] = tree(a[second] * a[first], a[second] * b[first] + b[second], start)
    h[0] = a[0] * start + b[0]
    h[2::2] = a[2::2] * h[1:len(h) - 1:2] + b[2::2]
    return h


def quotient(a, b, start) -> np.ndarray:
    """h[t] = p[t] (start + sum of b[s] / p[s]), p the running product of a.  Right only while p is far above the smallest number
    of the dtype, in float32 1e-38, which S tokens reach when dt A averages -87/S; beyond it p is 0 and b/p infinite.  A lesson."""
    with np.errstate(all="ignore"):
        p = np.cumprod(a, axis=0)
        return p * (start + np.cumsum(b / p, axis=0))


FORMS: dict[str, Callable] = {"sequential": sequential, "chunked": chunked, "doubling": doubling, "tree": tree}


def selective(form: Callable) -> Pair:
    """Mamba-1's scan by a form: the same pair as `selective_forward`, `selective_backward`."""
    def forward(x, dt, B, C, A_log, position, before):
        a = decay_of(dt, rates(A_log), position).swapaxes(0, 1)                     # [S, B, N, I]
        b = np.einsum("bsi,bsn->sbni", dt * x, B)                                   # [S, B, N, I]
        h = form(a, b, before)
        states = np.concatenate([before[None], h])                                  # [S+1, B, N, I]
        return np.einsum("sbni,bsn->bsi", h, C), states[len(h)], {"x": x, "dt": dt, "B": B, "C": C, "states": states}

    def backward(dy, dafter, saved, A_log, position):
        x, dt, B, C, states = (saved[name] for name in ("x", "dt", "B", "C", "states"))
        A, tokens = rates(A_log), x.shape[1]
        a = decay_of(dt, A, position).swapaxes(0, 1)                                # [S, B, N, I]
        b = np.einsum("bsi,bsn->sbni", dy, C)                                       # [S, B, N, I]
        later = np.concatenate([a[1:], np.ones_like(a[:1])])    # the gradient at t comes from t+1 by its decay
        dh = form(later[::-1], b[::-1], dafter)[::-1]                               # [S, B, N, I]
        dbefore = a[0] * dh[0] if tokens else dafter
        dlog = dh * a * states[:tokens]                                             # [S, B, N, I]
        inflow = np.einsum("sbni,bsn->bsi", dh, B)                                  # [B, S, I]
        dB, dC = np.einsum("sbni,bsi->bsn", dh, dt * x), np.einsum("sbni,bsi->bsn", states[1:], dy)
        ddt = x * inflow + np.einsum("sbni,ni->bsi", dlog, A)
        return (dt * inflow, ddt, dB, dC), dbefore, (np.einsum("sbni,bsi->ni", dlog, dt) * A).T
    return Pair(forward, backward)
