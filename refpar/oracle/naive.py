"""The judges: attention over all pairs of tokens, rotary pairs one by one, the scans token by token, as formulas stand.

Naive first, kept as the judge of the next (law 14): no layer runs these, and every fast form in `nn/` is compared with them.
"""
from __future__ import annotations

import numpy as np

from refpar.nn.attention import EVERYTHING, extend, keys_of, places, share_out, visible
from refpar.nn.scan import group_of
from refpar.nn.seams import Pair
from refpar.nn.selective import decay_of, rates
from refpar.nn.ssm import by_position

# ---------------------------------------------------------------------------------------------------------------- attention

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


def naive_rope(x, position, frequency, pairs: str = "interleaved"):
    """The definition, pair by pair with cosine and sine: the judge of the complex forms."""
    width = x.shape[-1]
    y = np.empty_like(x)
    for i in range(width // 2):
        a, b = (2 * i, 2 * i + 1) if pairs == "interleaved" else (i, width // 2 + i)
        angle = (position * frequency[i])[:, :, None]                               # [B, S, 1]
        cos, sin = np.cos(angle), np.sin(angle)
        y[..., a] = x[..., a] * cos - x[..., b] * sin
        y[..., b] = x[..., a] * sin + x[..., b] * cos
    return y


# ------------------------------------------------------------------------------------------------------------ Mamba-2's scan

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


def mamba2_recurrence() -> Pair:
    """Mamba-2's scan, as the seam `scan` wants it."""
    return by_position(Pair(scan_forward, scan_backward))


# ------------------------------------------------------------------------------------------------------------ Mamba-1's scan

def selective_forward(x, dt, B, C, A_log, position, before):
    """x, dt [B, S, I], B, C [B, S, N], A_log [I, N], before [B, N, I] -> y [B, S, I], after [B, N, I], saved."""
    a = decay_of(dt, rates(A_log), position)                                        # [B, S, N, I]
    y, state, states = np.empty_like(x), before, [before]
    for t in range(x.shape[1]):
        state = a[:, t] * state + (dt[:, t] * x[:, t])[:, None] * B[:, t, :, None]  # [B, N, I]
        y[:, t] = (C[:, t, :, None] * state).sum(1)
        states.append(state)
    return y, state, {"x": x, "dt": dt, "B": B, "C": C, "states": np.stack(states)}


def selective_backward(dy, dafter, saved, A_log, position):
    """dy like y, dafter like after -> (dx, ddt, dB, dC), dbefore, dA_log: the recurrence run from the end."""
    x, dt, B, C, states = (saved[name] for name in ("x", "dt", "B", "C", "states"))
    A = rates(A_log)
    a = decay_of(dt, A, position)                                                   # [B, S, N, I]
    dx, ddt, dB, dC, dA = *(np.empty_like(array) for array in (x, dt, B, C)), np.zeros_like(A)
    dstate = dafter                                                                 # [B, N, I]
    for t in reversed(range(x.shape[1])):
        dstate = dstate + dy[:, t, None] * C[:, t, :, None]
        inflow = (dstate * B[:, t, :, None]).sum(1)                                 # [B, I]: the gradient of dt x
        dlog = dstate * states[t] * a[:, t]                                         # [B, N, I]: of dt A
        dC[:, t] = (dy[:, t, None] * states[t + 1]).sum(2)
        dB[:, t] = (dstate * (dt[:, t] * x[:, t])[:, None]).sum(2)
        dx[:, t] = dt[:, t] * inflow
        ddt[:, t] = x[:, t] * inflow + (dlog * A).sum(1)
        dA += (dlog * dt[:, t, None]).sum(0)
        dstate = a[:, t] * dstate
    return (dx, ddt, dB, dC), dstate, (dA * A).T


def mamba1_recurrence() -> Pair:
    """Mamba-1's scan, as the seam `scan` wants it."""
    return by_position(Pair(selective_forward, selective_backward))
