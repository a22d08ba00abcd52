"""The Mamba-1 layer, as it stands inside the residual's norm.

    x, z = projections of the input                     x = silu(conv(x))
    dt_low, B, C = projections of x                     dt = softplus(dt_low dt + dt_bias)
    y = scan(x, dt, B, C) + skip x                      out = (y silu(z)) @ out

The second projections read the inner width I, not the layer's input as Mamba-2's do: where ranks share I their results are Partial.
The seam `over` completes them, in one message, and everything behind it is again each channel's own.  `carry` is what lies
before my tokens, for conv and scan alike.  Sizes come from the weights given, so a shard of channels passes through unchanged.

Gu and Dao 2023 (Mamba), section 3.4, figure 3.
"""
from __future__ import annotations

from functools import partial

import numpy as np

from refpar.config import Model
from refpar.nn.ops import linear_backward, linear_forward, silu_backward, silu_forward
from refpar.nn.projection import INTO, OUT_OF
from refpar.nn.seams import Layer, Pair, Seams
from refpar.nn.selective import chunked_backward, chunked_forward, selective_backward, selective_forward
from refpar.nn.ssm import activated_conv, by_position, left_out, own, time_step

FIRST = ("x", "z")                      # projections of the layer's input
SECOND = ("dt_low", "B", "C")           # and of the inner x
DIMS = {"x": "D I/tp", "z": "D I/tp", "conv": "W I/tp", "conv_bias": "I/tp", "dt_low": "I/tp R", "B": "I/tp N", "C": "I/tp N",
        "dt": "R I/tp", "dt_bias": "I/tp", "A_log": "I/tp N", "skip": "I/tp", "out": "I/tp D"}


def recurrence() -> Pair:
    """Token by token: the judge."""
    return by_position(Pair(selective_forward, selective_backward))


def chunked(carry: Pair) -> Pair:
    """In chunks that fit the cache."""
    return by_position(Pair(partial(chunked_forward, carry=carry), partial(chunked_backward, carry=carry)))


def second(over: Pair) -> Pair:
    """x [B, S, I] -> dt_low [B, S, R], B and C [B, S, N], complete on every rank that shares I."""
    def forward(x, w):
        parts = [linear_forward(x, w[name])[0] for name in SECOND]
        edges = np.cumsum([part.shape[2] for part in parts])[:2]
        whole = over.forward(np.concatenate(parts, axis=2))                         # [B, S, R+2*N]
        return [part.copy() for part in np.split(whole, edges, axis=2)], {"x": x}

    def backward(dparts, saved, w):
        edges = np.cumsum([part.shape[2] for part in dparts])[:2]
        dwhole = over.backward(np.concatenate(dparts, axis=2))                      # [B, S, R+2*N]
        grads, dx = {}, np.zeros_like(saved["x"])                                   # [B, S, I/tp]
        for name, dy in zip(SECOND, np.split(dwhole, edges, axis=2)):
            part, grads[name] = linear_backward(np.ascontiguousarray(dy), saved, w[name])
            dx += part
        return dx, grads
    return Pair(forward, backward)


def mamba1_layer(config: Model, seams: Seams) -> Layer:
    """The layer with its seams filled; `config.cut` leaves the scan out."""
    scan = left_out() if config.cut else seams.scan or chunked(seams.carry)
    into, out_of = seams.into or INTO, seams.out_of or OUT_OF
    conv, project, step = activated_conv(config, seams.carry), second(seams.over), time_step(config)
    kept = {"conv_bias": config.conv_bias, "dt_bias": config.dt_bias}
    dims = {name: text for name, text in DIMS.items() if kept.get(name, True)}

    def forward(x, w, batch, before):
        """x [B, S, D] -> y [B, S, D], after, saved.  Where w holds a shard of the channels, y is Partial."""
        saved, after = {}, {}
        u, saved["into"] = into.forward(x, {name: w[name] for name in FIRST}, batch)    # [B, S, I/tp]
        x, after["conv"], saved["conv"] = conv.forward(u["x"], w["conv"], w.get("conv_bias", 0), batch.position, before["conv"])
        (low, B, C), saved["second"] = project.forward(x, w)
        dt, saved["dt"] = linear_forward(low, w["dt"])                              # [B, S, I/tp]
        dt, saved["step"] = step.forward(dt, w.get("dt_bias", 0), batch.position)
        scanned, after["state"], saved["scan"] = scan.forward(x, dt, B, C, w["A_log"], batch, before["state"])
        y = scanned + w["skip"] * x                                                 # [B, S, I/tp]
        gate, act = silu_forward(u["z"])
        out, saved["out_of"] = out_of.forward(y * gate, w["out"], batch)            # [B, S, D] +tp
        return out, after, saved | {"gate": {"y": y, "gate": gate, "act": act}}

    def backward(dy, dafter, saved, w, batch):
        """dy [B, S, D] -> dx [B, S, D], dbefore, grads."""
        grads, du, dbefore, gate = {}, {}, {}, saved["gate"]
        dy, grads["out"] = out_of.backward(dy, saved["out_of"], w["out"], batch)    # [B, S, I/tp]
        du["z"] = silu_backward(dy * gate["y"], gate["act"])
        dy = dy * gate["gate"]
        x = saved["second"]["x"]                                                    # [B, S, I/tp]
        (dx, ddt, dB, dC), dbefore["state"], grads["A_log"] = scan.backward(
            dy, dafter["state"], saved["scan"], w["A_log"], batch)
        ddt = step.backward(ddt, saved["step"])
        dlow, grads["dt"] = linear_backward(ddt, saved["dt"], w["dt"])              # [B, S, R]
        grads |= {"skip": np.einsum("bsi,bsi->i", dy, x), "dt_bias": ddt.sum((0, 1))}
        dx_second, projected = project.backward([dlow, dB, dC], saved["second"], w)
        du["x"], dbefore["conv"], grads["conv"], grads["conv_bias"] = conv.backward(
            dx + w["skip"] * dy + dx_second, dafter["conv"], saved["conv"], w["conv"], batch.position)
        dx, products = into.backward(du, saved["into"], {name: w[name] for name in FIRST}, batch)   # [B, S, D] +tp
        return dx, dbefore, own(grads | products | projected, w)

    def start(w, batch):
        """No inputs before the first token, and a state of zeros."""
        rows, (taps, channels), states = len(batch.tokens), w["conv"].shape, w["A_log"].shape[1]
        conv = np.zeros((rows, taps - 1, channels), w["conv"].dtype)                # [B, W-1, I/tp]
        state = np.zeros((rows, states, channels), w["A_log"].dtype)                # [B, N, I/tp]
        return {"conv": conv, "state": state}

    return Layer(forward, backward, inside=dims, outside={}, start=start)
