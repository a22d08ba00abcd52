"""What Mamba-1 and Mamba-2 have in common: the activated conv, the time step, the skip, and the scan left out.

Each is a Pair, made where a layer is built, from those fields of the config that decide it.  A parameter that the config leaves
out is 0 and has no gradient: `own` drops it.

Gu and Dao 2023 (Mamba), section 3.4; Dao and Gu 2024 (Mamba-2), section 7.
"""
from __future__ import annotations

import math

import numpy as np

from refpar.config import Model
from refpar.nn.conv import conv_backward, conv_forward
from refpar.nn.ops import silu_backward, silu_forward
from refpar.nn.seams import Pair

ACTIVATIONS = {"silu": Pair(silu_forward, silu_backward), "none": Pair(lambda x: (x, {}), lambda dy, saved: dy)}


def own(grads: dict, w: dict) -> dict:
    """The gradients of the parameters that there are."""
    return {name: grad for name, grad in grads.items() if name in w}


def activated_conv(config: Model, carry: Pair) -> Pair:
    """act(conv(u) + bias) of one stream u [B, S, C]; bias [C], or 0."""
    act = ACTIVATIONS[config.conv_act]

    def forward(u, w, bias, position, before):
        u, after, conv = conv_forward(u, w, bias, position, before, carry)
        u, saved = act.forward(u)
        return u, after, {"conv": conv, "act": saved}

    def backward(du, dafter, saved, w, position):
        return conv_backward(act.backward(du, saved["act"]), dafter, saved["conv"], w, position, carry)
    return Pair(forward, backward)


# ------------------------------------------------------------------------------------------------------------------- scan

def by_position(scan: Pair) -> Pair:
    """A scan of given positions as the filling of the seam `scan`, which is given the batch (another rank's positions are there)."""
    def forward(x, dt, B, C, A_log, batch, before):
        return scan.forward(x, dt, B, C, A_log, batch.position, before)

    def backward(dy, dafter, saved, A_log, batch):
        return scan.backward(dy, dafter, saved, A_log, batch.position)
    return Pair(forward, backward)


# ------------------------------------------------------------------------------------------------------------- time step

def softplus_forward(x):
    """log(1 + exp(x)) as max(x, 0) + log(1 + exp(-|x|)), which cannot overflow."""
    y = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return y, {"y": y}


def softplus_backward(dy, saved):
    """Its derivative, the sigmoid, from y: 1 - exp(-y)."""
    return dy * -np.expm1(-saved["y"])


def time_step(config: Model) -> Pair:
    """softplus(dt + bias), held between the limits, and 0 at a pad: there no state decays and nothing enters it.

    dt [B, S, M] or [B, S, I].  Beyond a limit, and at a pad, the step does not move with dt.
    """
    low, high = config.dt_least, config.dt_most or math.inf

    def forward(dt, bias, position):
        step, _ = softplus_forward(dt + bias)
        step = np.clip(step, low, high) * (position >= 0)[..., None]
        return step, {"y": step}

    def backward(dstep, saved):
        step = saved["y"]
        return softplus_backward(dstep * ((low < step) & (step < high)), saved)
    return Pair(forward, backward)


# ------------------------------------------------------------------------------------------------------------------ skip

def skip(each: int) -> Pair:
    """y + skip x, with x, y [B, S, M, P] and `each` numbers a head: 1, skip [M], or P, skip [MP], a number for each channel."""
    def spread(skip):
        return skip.reshape(skip.size // each, each)

    def forward(y, x, skip):
        return y + spread(skip) * x, {"x": x}

    def backward(dy, saved, skip):
        dskip = np.einsum("bsmp,bsmp->mp", dy, saved["x"])                          # [M, P]
        heads, width = dskip.shape
        return spread(skip) * dy, dskip.reshape(heads * each, width // each).sum(1)
    return Pair(forward, backward)


# --------------------------------------------------------------------------------------------------------------- control

def left_out() -> Pair:
    """No scan, y = 0: the control of an experiment, in which a token sees others through the conv alone."""
    def forward(x, dt, B, C, A_log, batch, before):
        return np.zeros_like(x), before, {"x": x, "dt": dt, "B": B, "C": C}

    def backward(dy, dafter, saved, A_log, batch):
        return tuple(np.zeros_like(saved[name]) for name in ("x", "dt", "B", "C")), dafter, np.zeros_like(A_log)
    return Pair(forward, backward)
