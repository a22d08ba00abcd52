"""The selective scan of Mamba-1, in chunks.  Its recurrence as it stands, the judge, is in `oracle/naive.py`.

    h[t] = a[t] h[t-1] + dt[t] x[t] B[t]        a state [N, I]: N numbers for each channel
    y[t] = C[t] h[t]

with a[t] = exp(dt[t] A), A = -exp(A_log), and a[t] = 0 where position[t] = 0: a document begins without a past.  A pad has dt = 0:
nothing decays and nothing enters, so the state passes it unchanged.  Each channel and state decays at its own rate, so nothing
here is a product of matrices, and the scan is bound by memory: the fast form makes a and h for a few tokens at a time, which stay
in the cache, keeps only the states between chunks, and makes the others again in backward.  Channels are the last dim of the
state, where they are contiguous for every operation.

Law 5's three functions: a run of tokens is to the state what its `Summary` says, `merge` puts one run behind another, finishing is
the pair of equations above.  Gradients of the state come from the other end, and use the same merge.

Gu and Dao 2023 (Mamba), section 3.2 and algorithm 2, with dt x B for the discretised B x as in their code.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.nn.seams import ALONE

CHUNK = 16          # tokens: as many as fit the cache.  Measured: 8 takes up to a quarter longer


class Summary(NamedTuple):
    """A run of tokens as the state sees it: h -> decay h + state; both [B, N, I]."""
    decay: np.ndarray
    state: np.ndarray


def merge(first: Summary, second: Summary) -> Summary:
    """First one run, then the other.  Associative."""
    return Summary(first.decay * second.decay, second.decay * first.state + second.state)


def summary_of_state(state) -> Summary:
    """A state that is given.  Of zeros it is the identity of the merge: the empty run."""
    return Summary(np.ones_like(state), state)


def rates(A_log) -> np.ndarray:
    """A_log [I, N] -> A [N, I], below 0: how fast each channel and state decays."""
    return -np.exp(np.ascontiguousarray(A_log.T))                                   # [N, I]


def decay_of(dt, A, position) -> np.ndarray:
    """a [..., N, I] of dt [..., I] and position [...]: exp(dt A), and 0 where a document begins."""
    a = dt[..., None, :] * A
    np.exp(a, out=a)
    a[position == 0] = 0
    return a


def chunked_forward(x, dt, B, C, A_log, position, before, chunk: int = CHUNK, carry=ALONE):
    """x, dt [B, S, I], B, C [B, S, N], A_log [I, N], before [B, N, I] -> y [B, S, I], after, saved.

    Summing up my tokens, which `carry` needs, is a run from nothing; only where something does lie before them is there a second
    run, from there.
    """
    def run(state):
        y, starts = np.empty_like(x), []
        for part, X, step, B_, C_, position_ in chunks_of(chunk, dt * x, dt, B, C, position):
            starts.append(state)
            h = states_of(decay_of(step, A, position_), X, B_, state)               # [l, B, N, I]
            y[:, part] = product("C h", np.vecmat, C_, h).swapaxes(0, 1)
            state = h[-1].copy()
        return y, state, stacked(starts, state)

    A, nothing = rates(A_log), np.zeros_like(before)
    y, state, starts = run(nothing)
    here, on = carry.forward(merge, Summary(total_decay(dt, A, position), state), summary_of_state(before))
    if here.state.any():
        y, _, starts = run(here.state)
    return y, on.state, {"x": x, "dt": dt, "B": B, "C": C, "starts": starts}


def chunked_backward(dy, dafter, saved, A_log, position, chunk: int = CHUNK, carry=ALONE):
    """Its backward, from the end, with the states of each chunk made again; a second run where later tokens have a gradient."""
    x, dt, B, C, starts = (saved[name] for name in ("x", "dt", "B", "C", "starts"))
    A = rates(A_log)

    def run(dstate):
        grads, dA = [np.empty_like(array) for array in (x, dt, B, C)], np.zeros_like(A)
        parts = list(chunks_of(chunk, dt * x, x, dt, B, C, position, dy))
        for (part, *tokens), start in zip(reversed(parts), starts[::-1]):
            inner, dstate, dA_part = chunk_backward(*tokens, start, dstate, A)
            dA += dA_part
            for grad, mine in zip(grads, inner):
                grad[:, part] = mine.swapaxes(0, 1)
        return grads, dstate, dA

    grads, dstate, dA = run(np.zeros_like(dafter))
    here, on = carry.backward(merge, Summary(total_decay(dt, A, position), dstate), summary_of_state(dafter))
    if here.state.any():
        grads, _, dA = run(here.state)
    return tuple(grads), on.state, (dA * A).T


def chunks_of(chunk: int, *arrays):
    """(where it lies, the arrays' tokens [l, B, ...]) of each chunk of arrays [B, S, ...]; none of an empty row."""
    tokens = arrays[0].shape[1]
    for first in range(0, tokens, chunk):
        part = slice(first, min(first + chunk, tokens))
        yield part, *(array[:, part].swapaxes(0, 1) for array in arrays)


def stacked(starts: list, like) -> np.ndarray:
    """[c, B, N, I], of no chunks too."""
    return np.stack(starts) if starts else np.empty((0, *like.shape), like.dtype)


def states_of(a, X, B, start) -> np.ndarray:
    """The states after each token of a chunk, [l, B, N, I]: a of that shape, X = dt x [l, B, I], B [l, B, N], start [B, N, I]."""
    h = np.einsum("lbi,lbn->lbni", X, B)                                            # [l, B, N, I]
    for t in range(len(h)):
        h[t] += a[t] * (h[t - 1] if t else start)
    return h


def chunk_backward(X, x, dt, B, C, position, dy, start, dend, A):
    """One chunk: tokens [l, B, ...], `start` the state before it, `dend` the gradient of the state after it, both [B, N, I]
    -> the gradients of its x, dt, B and C, of `start`, and of A."""
    a = decay_of(dt, A, position)                                                   # [l, B, N, I]
    h = states_of(a, X, B, start)
    dh = np.einsum("lbi,lbn->lbni", dy, C)                                          # [l, B, N, I]
    for t in reversed(range(len(dh))):
        dh[t] += a[t + 1] * dh[t + 1] if t + 1 < len(dh) else dend
    dstart = a[0] * dh[0]
    dC, dB = product("C h", np.matvec, h, dy), product("B X", np.matvec, dh, X)     # [l, B, N]
    inflow = product("B X", np.vecmat, B, dh)                                       # [l, B, I]
    dlog = np.multiply(a, dh, out=a)                                                # [l, B, N, I]: of dt A
    dlog[0] *= start
    dlog[1:] *= h[:-1]
    ddt = x * inflow + np.einsum("lbni,ni->lbi", dlog, A)
    return (dt * inflow, ddt, dB, dC), dstart, np.einsum("lbni,lbi->ni", dlog, dt)


def total_decay(dt, A, position) -> np.ndarray:
    """What the tokens [B, S] leave of the state before them, [B, N, I]: nothing if a document begins among them."""
    return np.exp(dt.sum(1)[:, None] * A) * (position != 0).all(1)[:, None, None]


def product(name: str, contract, a, b) -> np.ndarray:
    """np.vecmat(vector, matrix) or np.matvec(matrix, vector), counted: 2mn for each matrix [m, n]."""
    watch.op(name, 2 * max(a, b, key=np.ndim).size)
    return contract(a, b)
