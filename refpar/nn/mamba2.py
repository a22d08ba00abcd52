"""The Mamba-2 layer, as it stands inside the residual's norm.

    z, x, B, C, dt = projections of the input           x, B, C = silu(conv of each)           dt = softplus(dt + dt_bias)
    y = scan(x, dt, B, C)                               out = norm(y silu(z)) @ out

Seams: `mix` is conv and scan with their weights, between the projections and the norm; `carry` is what lies before my tokens, for
the convs and the scan alike; `over` and `total` complete a group's statistic in the norm.  Sizes come from the weights given, so a
shard of heads passes through unchanged; only the width P of a head and the state N are no shard's business.

A filling of `mix` is a Pair:
    forward(x, B, C, dt, w, batch, before) -> y, after, saved          x, y [B, S, MP], B, C [B, S, GN], dt [B, S, M]
    backward(dy, dafter, saved, w, batch) -> (dx, dB, dC, ddt), dbefore, grads
where w has at least the parameters of MIX, before and after the names of `start`, and grads are shaped like the weights given.

Dao and Gu 2024 (Mamba-2), section 7: the projections run in parallel, before the scan.
"""
from __future__ import annotations

import numpy as np

from refpar.config import Model
from refpar.nn.conv import conv_backward, conv_forward
from refpar.nn.gated_norm import gated_norm_backward, gated_norm_forward
from refpar.nn.ops import linear_backward, linear_forward, silu_backward, silu_forward
from refpar.nn.scan import scan_backward, scan_forward
from refpar.nn.seams import Layer, Pair, Seams
from refpar.nn.ssd import ssd_backward, ssd_forward

PROJECTIONS = {"z": "D MP/tp", "x": "D MP/tp", "B": "D GN/tp", "C": "D GN/tp", "dt": "D M/tp"}
MIX = {"conv_x": "W MP/tp", "conv_B": "W GN/tp", "conv_C": "W GN/tp", "bias_x": "MP/tp", "bias_B": "GN/tp", "bias_C": "GN/tp",
       "dt_bias": "M/tp", "A_log": "M/tp", "skip": "M/tp"}
NORM_AND_OUT = {"gate_norm": "MP/tp", "out": "MP/tp D"}


def softplus_forward(x):
    """log(1 + exp(x)) as max(x, 0) + log(1 + exp(-|x|)), which cannot overflow."""
    y = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return y, {"y": y}


def softplus_backward(dy, saved):
    """Its derivative, the sigmoid, from y: 1 - exp(-y)."""
    return dy * -np.expm1(-saved["y"])


# ------------------------------------------------------------------------------------------------------- fillings of the scan

def recurrence() -> Pair:
    """Token by token: the judge."""
    return Pair(scan_forward, scan_backward)


def chunked(chunk: int, carry: Pair) -> Pair:
    """In chunks, by matrix products."""
    def forward(x, dt, B, C, w, position, before):
        return ssd_forward(x, dt, B, C, w, position, before, chunk, carry)

    def backward(dy, dafter, saved, w, position):
        return ssd_backward(dy, dafter, saved, w, position, chunk, carry)
    return Pair(forward, backward)


def left_out() -> Pair:
    """No scan, y = skip x: the control of an experiment, in which a token sees others through the conv alone."""
    def forward(x, dt, B, C, w, position, before):
        return w["skip"][:, None] * x, before, {"x": x, "dt": dt, "B": B, "C": C}

    def backward(dy, dafter, saved, w, position):
        none = (np.zeros_like(saved[name]) for name in ("dt", "B", "C"))
        grads = {"A_log": np.zeros_like(w["A_log"]), "skip": np.vecdot(dy, saved["x"]).sum((0, 1))}
        return (w["skip"][:, None] * dy, *none), dafter, grads
    return Pair(forward, backward)


# ----------------------------------------------------------------------------------------------------------- conv and scan

def mix(config: Model, carry: Pair, scan: Pair) -> Pair:
    """The plain filling of the seam `mix`: x, B and C through their convs, then the scan."""
    def heads(x, width):
        return x.reshape(*x.shape[:2], x.shape[2] // width, width)                  # [B, S, M, P] or [B, S, G, N]

    def forward(x, B, C, dt, w, batch, before):
        after, saved, mixed = {}, {}, {}
        for name, u in {"x": x, "B": B, "C": C}.items():
            u, after[f"conv_{name}"], conv = conv_forward(
                u, w[f"conv_{name}"], w[f"bias_{name}"], batch.position, before[f"conv_{name}"], carry)
            mixed[name], act = silu_forward(u)
            saved[name] = {"conv": conv, "act": act}
        step, saved["dt"] = softplus_forward(dt + w["dt_bias"])                     # [B, S, M]
        y, after["state"], saved["scan"] = scan.forward(
            heads(mixed["x"], config.ssm_head_width), step, heads(mixed["B"], config.state), heads(mixed["C"], config.state),
            w, batch.position, before["state"])
        return y.reshape(x.shape), after, saved

    def backward(dy, dafter, saved, w, batch):
        (dx, ddt, dB, dC), dstate, grads = scan.backward(
            heads(dy, config.ssm_head_width), dafter["state"], saved["scan"], w, batch.position)
        dbefore, inputs = {}, []
        for name, du in {"x": dx, "B": dB, "C": dC}.items():
            du = silu_backward(du.reshape(*du.shape[:2], du.shape[2] * du.shape[3]), saved[name]["act"])
            du, dbefore[f"conv_{name}"], grads[f"conv_{name}"], grads[f"bias_{name}"] = conv_backward(
                du, dafter[f"conv_{name}"], saved[name]["conv"], w[f"conv_{name}"], batch.position, carry)
            inputs.append(du)
        ddt = softplus_backward(ddt, saved["dt"])
        return (*inputs, ddt), dbefore | {"state": dstate}, grads | {"dt_bias": ddt.sum((0, 1))}
    return Pair(forward, backward)


# ---------------------------------------------------------------------------------------------------------------- the layer

def mamba2_layer(config: Model, seams: Seams) -> Layer:
    """The layer with its seams filled; `config.cut` leaves the scan out."""
    scan = left_out() if config.cut else chunked(config.chunk, seams.carry)
    mixing = seams.mix or mix(config, seams.carry, scan)

    def forward(x, w, batch, before):
        """x [B, S, D] -> y [B, S, D], after, saved.  Where w holds a shard of the heads, y is Partial."""
        u, saved = {}, {}
        for name in PROJECTIONS:
            u[name], saved[name] = linear_forward(x, w[name])                       # [B, S, MP/tp], ... [B, S, M/tp]
        y, after, saved["mix"] = mixing.forward(u["x"], u["B"], u["C"], u["dt"], w, batch, before)
        groups = w["conv_B"].shape[1] // config.state
        y, saved["norm"] = gated_norm_forward(y, u["z"], w["gate_norm"], groups, config.norm_eps, seams.over, seams.total)
        y, saved["out"] = linear_forward(y, w["out"])                               # [B, S, D] +tp
        return y, after, saved

    def backward(dy, dafter, saved, w, batch):
        """dy [B, S, D] -> dx [B, S, D], dbefore, grads."""
        grads, du = {}, {}
        dy, grads["out"] = linear_backward(dy, saved["out"], w["out"])              # [B, S, MP/tp]
        dy, du["z"], grads["gate_norm"] = gated_norm_backward(dy, saved["norm"], w["gate_norm"], seams.over)
        (du["x"], du["B"], du["C"], du["dt"]), dbefore, inner = mixing.backward(dy, dafter, saved["mix"], w, batch)
        dx = np.zeros_like(saved["z"]["x"])                                         # [B, S, D] +tp
        for name in PROJECTIONS:
            part, grads[name] = linear_backward(du[name], saved[name], w[name])
            dx += part
        return dx, dbefore, grads | inner

    def start(w, batch):
        """No inputs before the first token, and a state of zeros."""
        rows, heads = len(batch.tokens), len(w["A_log"])
        before = {name: np.zeros((rows, len(w[name]) - 1, w[name].shape[1]), w[name].dtype)
                  for name in ("conv_x", "conv_B", "conv_C")}                       # [B, W-1, MP/tp] or [B, W-1, GN/tp]
        return before | {"state": np.zeros((rows, heads, config.ssm_head_width, config.state), w["A_log"].dtype)}

    return Layer(forward, backward, inside=PROJECTIONS | MIX | NORM_AND_OUT, outside={}, start=start)
