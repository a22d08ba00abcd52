"""Mamba-2's norm and gate: channels are divided by the root of their mean square, each group by its own.

    norm(y silu(z)) w       gate first, as published            norm(y) w silu(z)       norm first, an option of the same code

Where ranks share a group, `over` and `total` complete its statistic (law 5: `squares`, a merge, `squares_finish`): the sum of
squares is Partial, and in backward so is the gradient of the finished scale.

Dao and Gu 2024 (Mamba-2), section 7; `norm_before_gate` in its code.
"""
from __future__ import annotations

import numpy as np

from refpar.nn.ops import Squares, silu_backward, silu_forward, squares, squares_finish
from refpar.nn.seams import SAME, Pair


def in_groups(x, groups: int):
    """[..., MP] -> [..., G, MP/G]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def group_norm_forward(y, w, groups: int, eps: float, over: Pair = SAME, total=lambda count: count):
    """y [B, S, MP], w [MP] -> norm(y) w; `groups` is how many of them are here, whole or in part."""
    grouped = in_groups(y, groups)                                                  # [B, S, Q, C/Q]
    mine = squares(grouped)                                                         # [B, S, Q, 1] +tp
    width = int(total(mine.width))
    scale = squares_finish(Squares(over.forward(mine.total), width), eps)           # [B, S, Q, 1]
    out = (grouped * scale).reshape(y.shape)
    out *= w
    return out, {"y": y, "scale": scale, "width": width}


def group_norm_backward(dout, saved, w, over: Pair = SAME):
    """dout [B, S, MP] -> dy, dw."""
    scale = saved["scale"]
    groups = scale.shape[2]
    normed = in_groups(saved["y"], groups) * scale                                  # [B, S, Q, C/Q]
    dw = np.einsum("bsc,bsc->c", dout, normed.reshape(dout.shape))
    dy = in_groups(dout * w, groups)                                                # [B, S, Q, C/Q]
    along = over.backward(np.vecdot(dy, normed)[..., None])                         # [B, S, Q, 1]
    normed *= along / saved["width"]            # the part that only lengthens a group: the statistic takes it out again
    dy -= normed
    dy *= scale
    return dy.reshape(dout.shape), dw


def gate_forward(y, z):
    """y silu(z)."""
    gate, act = silu_forward(z)
    return y * gate, {"y": y, "gate": gate, "act": act}


def gate_backward(dout, saved):
    """dout -> dy, dz."""
    return dout * saved["gate"], silu_backward(dout * saved["y"], saved["act"])


def gated_norm(norm_first: bool) -> Pair:
    """forward(y, z, w, groups, eps, over, total) -> out, saved; backward(dout, saved, w, over) -> dy, dz, dw."""
    def gate_then_norm(y, z, w, *rest):
        y, gate = gate_forward(y, z)
        out, norm = group_norm_forward(y, w, *rest)
        return out, {"gate": gate, "norm": norm}

    def gate_then_norm_backward(dout, saved, w, over=SAME):
        dy, dw = group_norm_backward(dout, saved["norm"], w, over)
        return *gate_backward(dy, saved["gate"]), dw

    def norm_then_gate(y, z, w, *rest):
        y, norm = group_norm_forward(y, w, *rest)
        out, gate = gate_forward(y, z)
        return out, {"gate": gate, "norm": norm}

    def norm_then_gate_backward(dout, saved, w, over=SAME):
        dy, dz = gate_backward(dout, saved["gate"])
        dy, dw = group_norm_backward(dy, saved["norm"], w, over)
        return dy, dz, dw
    return Pair(norm_then_gate, norm_then_gate_backward) if norm_first else Pair(gate_then_norm, gate_then_norm_backward)
