"""Mamba-2's norm: the gated y silu(z) is divided by the root of its mean square, each group of channels by its own.

Groups are those of B and C: MP/G channels each, MP local ones over as many groups as are here.  Where ranks share a group, `over`
and `total` complete its statistic (law 5: `squares`, a merge, `squares_finish`): the sum of squares is Partial, and in backward so
is the gradient of the finished scale.

Dao and Gu 2024 (Mamba-2), section 7; gating before the norm, as in its published code (`norm_before_gate` off).
"""
from __future__ import annotations

import numpy as np

from refpar.nn.ops import Squares, silu_backward, silu_forward, squares, squares_finish
from refpar.nn.seams import SAME, Pair


def in_groups(x, groups: int):
    """[..., MP] -> [..., G, MP/G]."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def gated_norm_forward(y, z, w, groups: int, eps: float, over: Pair = SAME, total=lambda count: count):
    """y, z [B, S, MP], w [MP] -> norm(y silu(z)) w, [B, S, MP]."""
    gate, act = silu_forward(z)
    out = in_groups(y * gate, groups)                                               # [B, S, G, MP/G]
    mine = squares(out)                                                             # [B, S, G, 1] +tp
    width = int(total(mine.width))
    scale = squares_finish(Squares(over.forward(mine.total), width), eps)           # [B, S, G, 1]
    out *= scale
    out = out.reshape(y.shape)
    out *= w
    return out, {"y": y, "gate": gate, "act": act, "scale": scale, "width": width}


def gated_norm_backward(dout, saved, w, over: Pair = SAME):
    """dout [B, S, MP] -> dy, dz, dw."""
    y, gate, scale = saved["y"], saved["gate"], saved["scale"]
    groups = scale.shape[2]
    normed = in_groups(y * gate, groups)                                            # [B, S, G, MP/G]
    normed *= scale
    dw = np.einsum("bsc,bsc->c", dout, normed.reshape(y.shape))
    dgated = in_groups(dout * w, groups)                                            # [B, S, G, MP/G]
    along = over.backward(np.vecdot(dgated, normed)[..., None])                     # [B, S, G, 1]
    normed *= along / saved["width"]            # the part that only lengthens a group: the statistic takes it out again
    dgated -= normed
    dgated *= scale
    dgated = dgated.reshape(y.shape)
    return dgated * gate, silu_backward(dgated * y, saved["act"]), dw
