"""The Mamba-2 layer, as it stands inside the residual's norm.

    z, x, B, C, dt = projections of the input           x, B, C = silu(conv of each)           dt = softplus(dt + dt_bias)
    y = scan(x, dt, B, C) + skip x                      out = norm(y silu(z)) @ out

Seams: `mix` is conv and scan with their weights, between the projections and the norm; `carry` is what lies before my tokens, for
the convs and the scan alike; `over` completes the statistic of the norm's groups, of which `lengths` says what is here.  Sizes come
from the weights given, so a shard of heads passes through unchanged; only the width P of a head and the state N are no shard's
business.

A filling of `mix` is a Pair:
    forward(x, B, C, dt, w, batch, before) -> y, after, saved          x, y [B, S, MP], B, C [B, S, GN], dt [B, S, M]
    backward(dy, dafter, saved, w, batch) -> (dx, dB, dC, ddt), dbefore, grads
where w has at least those parameters of MIX that the config keeps, before and after the names of `start`, and grads are shaped like
the weights given.

Dao and Gu 2024 (Mamba-2), section 7: the projections run in parallel, before the scan.
"""
from __future__ import annotations

from functools import partial

import numpy as np

from refpar.config import Model
from refpar.nn.gated_norm import gated_norm
from refpar.nn.projection import INTO, OUT_OF
from refpar.nn.seams import Layer, Pair, Seams
from refpar.nn.ssd import ssd_backward, ssd_forward
from refpar.nn.ssm import activated_conv, by_position, left_out, own, skip, time_step

PROJECTIONS = {"z": "D MP/tp", "x": "D MP/tp", "B": "D GN/tp", "C": "D GN/tp", "dt": "D M/tp"}
MIX = {"conv_x": "W MP/tp", "conv_B": "W GN/tp", "conv_C": "W GN/tp", "bias_x": "MP/tp", "bias_B": "GN/tp", "bias_C": "GN/tp",
       "dt_bias": "M/tp", "A_log": "M/tp", "skip": "M/tp"}
NORM_AND_OUT = {"gate_norm": "MP/tp", "out": "MP/tp D"}


def dims_of(config: Model) -> dict[str, str]:
    """The parameters that the config keeps, and their dims."""
    left = {"bias_x": config.conv_bias, "bias_B": config.conv_bias, "bias_C": config.conv_bias, "dt_bias": config.dt_bias}
    dims = PROJECTIONS | MIX | NORM_AND_OUT | {"skip": "MP/tp" if config.skip_by == "channel" else "M/tp"}
    return {name: text for name, text in dims.items() if left.get(name, True)}


# ------------------------------------------------------------------------------------------------------- fillings of the scan

def chunked(chunk: int, carry: Pair) -> Pair:
    """In chunks, by matrix products."""
    return by_position(Pair(partial(ssd_forward, chunk=chunk, carry=carry), partial(ssd_backward, chunk=chunk, carry=carry)))


# ----------------------------------------------------------------------------------------------------------- conv and scan

def mix(config: Model, carry: Pair, scan: Pair) -> Pair:
    """The plain filling of the seam `mix`: x, B and C through their convs, then the scan and its skip."""
    conv, step = activated_conv(config, carry), time_step(config)
    skipped = skip(config.ssm_head_width if config.skip_by == "channel" else 1)

    def heads(x, width):
        return x.reshape(*x.shape[:2], x.shape[2] // width, width)                  # [B, S, M, P] or [B, S, G, N]

    def forward(x, B, C, dt, w, batch, before):
        after, saved, mixed = {}, {}, {}
        for name, u in {"x": x, "B": B, "C": C}.items():
            mixed[name], after[f"conv_{name}"], saved[name] = conv.forward(
                u, w[f"conv_{name}"], w.get(f"bias_{name}", 0), batch.position, before[f"conv_{name}"])
        dt, saved["dt"] = step.forward(dt, w.get("dt_bias", 0), batch.position)     # [B, S, M]
        u = heads(mixed["x"], config.ssm_head_width)                                # [B, S, M, P]
        y, after["state"], saved["scan"] = scan.forward(u, dt, heads(mixed["B"], config.state), heads(mixed["C"], config.state),
                                                        w["A_log"], batch, before["state"])
        y, saved["skip"] = skipped.forward(y, u, w["skip"])                         # [B, S, M, P]
        return y.reshape(x.shape), after, saved

    def backward(dy, dafter, saved, w, batch):
        grads, dbefore, inputs = {}, {}, []
        dy = heads(dy, config.ssm_head_width)                                       # [B, S, M, P]
        (dx, ddt, dB, dC), dbefore["state"], grads["A_log"] = scan.backward(
            dy, dafter["state"], saved["scan"], w["A_log"], batch)
        dx_skip, grads["skip"] = skipped.backward(dy, saved["skip"], w["skip"])
        for name, du in {"x": dx + dx_skip, "B": dB, "C": dC}.items():
            du = du.reshape(*du.shape[:2], du.shape[2] * du.shape[3])
            du, dbefore[f"conv_{name}"], grads[f"conv_{name}"], grads[f"bias_{name}"] = conv.backward(
                du, dafter[f"conv_{name}"], saved[name], w[f"conv_{name}"], batch.position)
            inputs.append(du)
        ddt = step.backward(ddt, saved["dt"])
        return (*inputs, ddt), dbefore, own(grads | {"dt_bias": ddt.sum((0, 1))}, w)
    return Pair(forward, backward)


# ---------------------------------------------------------------------------------------------------------------- the layer

def mamba2_layer(config: Model, seams: Seams) -> Layer:
    """The layer with its seams filled; `config.cut` leaves the scan out."""
    scan = left_out() if config.cut else seams.scan or chunked(config.chunk, seams.carry)
    into, out_of = seams.into or INTO, seams.out_of or OUT_OF
    mixing = seams.mix or mix(config, seams.carry, scan)
    norm, width = gated_norm(config.norm_first), config.norm_width

    def groups(channels):
        """The channels of each of the norm's groups that are here, of one at least a share; and of a whole one."""
        whole = [min(channels, width)] * max(1, channels // width)
        return whole if seams.lengths is None else seams.lengths, width

    def forward(x, w, batch, before):
        """x [B, S, D] -> y [B, S, D], after, saved.  Where w holds a shard of the heads, y is Partial."""
        saved = {}
        u, saved["into"] = into.forward(x, {name: w[name] for name in PROJECTIONS}, batch)
        y, after, saved["mix"] = mixing.forward(u["x"], u["B"], u["C"], u["dt"], w, batch, before)
        y, saved["norm"] = norm.forward(y, u["z"], w["gate_norm"], *groups(y.shape[2]), config.norm_eps, seams.over)
        y, saved["out_of"] = out_of.forward(y, w["out"], batch)                     # [B, S, D] +tp
        return y, after, saved

    def backward(dy, dafter, saved, w, batch):
        """dy [B, S, D] -> dx [B, S, D], dbefore, grads."""
        grads, du = {}, {}
        dy, grads["out"] = out_of.backward(dy, saved["out_of"], w["out"], batch)    # [B, S, MP/tp]
        dy, du["z"], grads["gate_norm"] = norm.backward(dy, saved["norm"], w["gate_norm"], *groups(dy.shape[2]), seams.over)
        (du["x"], du["B"], du["C"], du["dt"]), dbefore, inner = mixing.backward(dy, dafter, saved["mix"], w, batch)
        dx, products = into.backward(du, saved["into"], {name: w[name] for name in PROJECTIONS}, batch)     # [B, S, D] +tp
        return dx, dbefore, grads | products | inner

    def start(w, batch):
        """No inputs before the first token, and a state of zeros."""
        rows, heads = len(batch.tokens), len(w["A_log"])
        before = {name: np.zeros((rows, len(w[name]) - 1, w[name].shape[1]), w[name].dtype)
                  for name in ("conv_x", "conv_B", "conv_C")}                       # [B, W-1, MP/tp] or [B, W-1, GN/tp]
        return before | {"state": np.zeros((rows, heads, config.ssm_head_width, config.state), w["A_log"].dtype)}

    return Layer(forward, backward, inside=dims_of(config), outside={}, start=start)
