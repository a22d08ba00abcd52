"""Mamba-2's norm and gate: channels are divided by the root of their mean square, each group by its own.

    norm(y silu(z)) w       gate first, as published            norm(y) w silu(z)       norm first, an option of the same code

The channels that are here may be parts of groups, the first and the last of them shorter than the others.  Then `over` completes the
statistic among the ranks that share a group (law 5: `squares`, a merge, `squares_finish`): the sum of squares is Partial, and in
backward so is the gradient of the finished scale.

Dao and Gu 2024 (Mamba-2), section 7; `norm_before_gate` in its code.
"""
from __future__ import annotations

import numpy as np

from refpar.nn.ops import Squares, silu_backward, silu_forward, squares_finish
from refpar.nn.seams import SAME, Pair


def sums(x, lengths):
    """x [B, S, C] -> the sum over each group's channels, [B, S, Q]; `lengths` are those of the Q groups that are here."""
    return np.add.reduceat(x, np.cumsum([0, *lengths])[:len(lengths)], axis=2)


def group_norm_forward(y, w, lengths, width: int, eps: float, over: Pair = SAME):
    """y [B, S, C], w [C] -> norm(y) w.  `lengths`: channels here of each group; `width`: those of a whole group."""
    squares = over.forward(sums(y * y, lengths))                                    # [B, S, Q]
    scale = squares_finish(Squares(squares, width), eps)                            # [B, S, Q]
    out = y * np.repeat(scale, lengths, axis=2)                                     # [B, S, C]
    out *= w
    return out, {"y": y, "scale": scale}


def group_norm_backward(dout, saved, w, lengths, width: int, over: Pair = SAME):
    """dout [B, S, C] -> dy, dw."""
    scale = np.repeat(saved["scale"], lengths, axis=2)                              # [B, S, C]
    normed = saved["y"] * scale
    dw = np.einsum("bsc,bsc->c", dout, normed)
    dy = dout * w                                                                   # [B, S, C]
    along = over.backward(sums(dy * normed, lengths))                               # [B, S, Q]
    normed *= np.repeat(along / width, lengths, axis=2)         # the part that only lengthens a group: the statistic takes it out
    dy -= normed
    dy *= scale
    return dy, dw


def gate_forward(y, z):
    """y silu(z)."""
    gate, act = silu_forward(z)
    return y * gate, {"y": y, "gate": gate, "act": act}


def gate_backward(dout, saved):
    """dout -> dy, dz."""
    return dout * saved["gate"], silu_backward(dout * saved["y"], saved["act"])


def gated_norm(norm_first: bool) -> Pair:
    """forward(y, z, w, lengths, width, eps, over) -> out, saved; backward(dout, saved, w, lengths, width, over) -> dy, dz, dw."""
    def gate_then_norm(y, z, w, *rest):
        y, gate = gate_forward(y, z)
        out, norm = group_norm_forward(y, w, *rest)
        return out, {"gate": gate, "norm": norm}

    def gate_then_norm_backward(dout, saved, w, *rest):
        dy, dw = group_norm_backward(dout, saved["norm"], w, *rest)
        return *gate_backward(dy, saved["gate"]), dw

    def norm_then_gate(y, z, w, *rest):
        y, norm = group_norm_forward(y, w, *rest)
        out, gate = gate_forward(y, z)
        return out, {"gate": gate, "norm": norm}

    def norm_then_gate_backward(dout, saved, w, *rest):
        dy, dz = gate_backward(dout, saved["gate"])
        dy, dw = group_norm_backward(dy, saved["norm"], w, *rest)
        return dy, dz, dw
    return Pair(norm_then_gate, norm_then_gate_backward) if norm_first else Pair(gate_then_norm, gate_then_norm_backward)
