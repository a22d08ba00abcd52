"""The MLPs: SwiGLU, with gate and up (Shazeer 2020), and GELU, with one matrix up.

Biases inside the seams are added here; that of the output, down_bias, stands outside them, where `nn/residual.py` adds it once.
"""
from __future__ import annotations

from refpar.config import Model
from refpar.nn.gelu import gelu_backward, gelu_forward, gelu_tanh_backward, gelu_tanh_forward
from refpar.nn.ops import stacked_backward, stacked_forward, summed, swiglu_backward, swiglu_forward
from refpar.nn.pieces import Piece, linear, with_bias
from refpar.nn.seams import Layer, Pair, Seams

ACTIVATIONS = {"swiglu": Pair(swiglu_forward, swiglu_backward), "gelu": Pair(gelu_forward, gelu_backward),
               "gelu_tanh": Pair(gelu_tanh_forward, gelu_tanh_backward)}
GATE_BIASES = ("gate_bias", "up_bias")


def gate_up() -> Piece:
    """x [..., D] -> [2, ..., F]: gate and up are one stacked weight."""
    def forward(x, w):
        return stacked_forward(x, w["gate_up"])

    def backward(dy, saved, w):
        dx, dw = stacked_backward(dy, saved, w["gate_up"])
        return dx, {"gate_up": dw}

    return Piece(forward, backward, {"gate_up": "2 D F/tp"})


def with_gate_biases(piece: Piece) -> Piece:
    """The same, plus a bias each."""
    def forward(x, w):
        y, saved = piece.forward(x, w)
        for part, name in zip(y, GATE_BIASES):
            part += w[name]
        return y, saved

    def backward(dy, saved, w):
        dx, grads = piece.backward(dy, saved, w)
        return dx, grads | {name: summed(part) for part, name in zip(dy, GATE_BIASES)}

    return Piece(forward, backward, piece.dims | dict.fromkeys(GATE_BIASES, "F/tp"))


def inward(config: Model) -> Piece:
    """From the width to that of the MLP."""
    if config.mlp == "swiglu":
        return with_gate_biases(gate_up()) if config.mlp_bias else gate_up()
    up = linear("up", "D F/tp")
    return with_bias(up, "up_bias", "F/tp") if config.mlp_bias else up


def mlp_layer(config: Model, seams: Seams) -> Layer:
    """Up, an activation, and down."""
    up, act, down = inward(config), ACTIVATIONS[config.mlp], linear("down", "F/tp D")

    def forward(x, w, batch, before):
        h, up_saved = up.forward(x, w)                                              # [2, B, S, F/tp] or [B, S, F/tp]
        a, act_saved = act.forward(h)                                               # [B, S, F/tp]
        y, down_saved = down.forward(a, w)                                          # [B, S, D] +tp
        return y, None, {"up": up_saved, "act": act_saved, "down": down_saved}

    def backward(dy, dafter, saved, w, batch):
        da, down_grads = down.backward(dy, saved["down"], w)                        # [B, S, F/tp]
        dh = act.backward(da, saved["act"])                                         # [2, B, S, F/tp] or [B, S, F/tp]
        dx, up_grads = up.backward(dh, saved["up"], w)                              # [B, S, D] +tp
        return dx, None, up_grads | down_grads

    return Layer(forward, backward, up.dims | down.dims, {"down_bias": "D"} if config.mlp_bias else {})
