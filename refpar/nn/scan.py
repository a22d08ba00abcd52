"""The selective scan of Mamba-2, token by token: what it means, and the judge of the fast form in `ssd.py`.

    h[t] = a[t] h[t-1] + dt[t] x[t] B[t]'       a state [P, N] for each head
    y[t] = h[t] C[t]

with a[t] = exp(dt[t] A), A = -exp(A_log) of the head, and a[t] = 0 where position[t] = 0: a document begins without a past.  A pad
has dt = 0, so the state passes it unchanged.
Heads share B and C in groups: head m is of group m*G//M.

What lies before the first token is the state `before` [B, M, P, N].  Law 5's three functions: a run of tokens is to the state what
its `Summary` says, `merge` puts one run behind another, and finishing is the pair of equations above.

Dao and Gu 2024 (Mamba-2), equation 1 with a scalar a; Gu and Dao 2023 (Mamba), for the discretisation.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Summary(NamedTuple):
    """A run of tokens as the state sees it: h -> decay h + state; decay [B, M], state [B, M, P, N]."""
    decay: np.ndarray
    state: np.ndarray


def merge(first: Summary, second: Summary) -> Summary:
    """First one run, then the other.  Associative.  Gradients of the state use it too, with the later tokens first."""
    return Summary(first.decay * second.decay, second.decay[..., None, None] * first.state + second.state)


def summary_of_state(state) -> Summary:
    """A state that is given.  Of zeros it is the identity of the merge: the empty run."""
    return Summary(np.ones(state.shape[:2], state.dtype), state)


def group_of(heads: int, groups: int) -> np.ndarray:
    """The group of each head, [M]."""
    return np.arange(heads) * groups // heads


def scan_forward(x, dt, B, C, A_log, position, before):
    """x [B, S, M, P], dt [B, S, M], B and C [B, S, G, N], A_log [M], before [B, M, P, N]
    -> y [B, S, M, P], after [B, M, P, N], saved."""
    group = group_of(x.shape[2], B.shape[2])
    decay = np.exp(dt * -np.exp(A_log)) * (position != 0)[..., None]           # [B, S, M]
    y, state, states = np.empty_like(x), before, [before]
    for t in range(x.shape[1]):
        entering = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, group, None]  # [B, M, P, N]
        state = decay[:, t, :, None, None] * state + entering
        y[:, t] = (state * C[:, t, group, None]).sum(-1)
        states.append(state)
    return y, state, {"x": x, "dt": dt, "B": B, "C": C, "states": np.stack(states)}


def scan_backward(dy, dafter, saved, A_log, position):
    """dy like y, dafter like after -> (dx, ddt, dB, dC), dbefore, dA_log: the recurrence run from the end."""
    x, dt, B, C, states = saved["x"], saved["dt"], saved["B"], saved["C"], saved["states"]
    group, A = group_of(x.shape[2], B.shape[2]), -np.exp(A_log)
    decay = np.exp(dt * A) * (position != 0)[..., None]                            # [B, S, M]
    dx, ddt, dB, dC, dA = np.empty_like(x), np.empty_like(dt), np.zeros_like(B), np.zeros_like(C), np.zeros_like(A)
    dstate = dafter                                                                 # [B, M, P, N]
    for t in reversed(range(x.shape[1])):
        dstate = dstate + dy[:, t, :, :, None] * C[:, t, group, None]
        dC_heads = (dy[:, t, :, :, None] * states[t + 1]).sum(2)  # [B, M, N]
        inflow = (dstate * B[:, t, group, None]).sum(-1)                            # [B, M, P]
        dx[:, t] = dt[:, t, :, None] * inflow
        dlog = (dstate * states[t]).sum((-2, -1)) * decay[:, t]                     # [B, M]: of dt A
        ddt[:, t] = (inflow * x[:, t]).sum(-1) + dlog * A
        dA += (dlog * dt[:, t]).sum(0)
        dB_heads = (dstate * (dt[:, t, :, None] * x[:, t])[..., None]).sum(2)       # [B, M, N]
        for m, g in enumerate(group):
            dB[:, t, g] += dB_heads[:, m]
            dC[:, t, g] += dC_heads[:, m]
        dstate = decay[:, t, :, None, None] * dstate
    return (dx, ddt, dB, dC), dstate, dA * A
