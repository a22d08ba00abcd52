"""The MLPs: SwiGLU, with gate and up (Shazeer 2020), and GELU, with one matrix up.

Biases inside the seams are added here; that of the output, down_bias, stands outside them, where `nn/residual.py` adds it once.
"""
from __future__ import annotations

import numpy as np

from refpar.config import Model
from refpar.nn.gelu import gelu_backward, gelu_forward, gelu_tanh_backward, gelu_tanh_forward
from refpar.nn.ops import summed, swiglu_backward, swiglu_forward
from refpar.nn.projection import INTO, OUT_OF
from refpar.nn.seams import Layer, Pair, Seams

ACTIVATIONS = {"swiglu": Pair(swiglu_forward, swiglu_backward), "gelu": Pair(gelu_forward, gelu_backward),
               "gelu_tanh": Pair(gelu_tanh_forward, gelu_tanh_backward)}
GATE_BIASES = ("gate_bias", "up_bias")


def inward(config: Model) -> dict[str, str]:
    """The maps from the width to that of the MLP, and their biases: gate and up are one stacked weight."""
    maps = {"gate_up": "2 D F/tp"} if config.mlp == "swiglu" else {"up": "D F/tp"}
    biases = GATE_BIASES if config.mlp == "swiglu" else GATE_BIASES[1:]
    return maps | (dict.fromkeys(biases, "F/tp") if config.mlp_bias else {})


def mlp_layer(config: Model, seams: Seams) -> Layer:
    """Up, an activation, and down."""
    act, into, out_of = ACTIVATIONS[config.mlp], seams.into or INTO, seams.out_of or OUT_OF
    name, *biases = inward(config)

    def parts(h):
        return h if name == "gate_up" else [h]

    def biased(h, w):
        some = [part + w[bias] for part, bias in zip(parts(h), biases)]
        return h if not biases else np.stack(some) if name == "gate_up" else some[0]

    def forward(x, w, batch, before):
        ys, into_saved = into.forward(x, {name: w[name]}, batch)
        h = biased(ys[name], w)                                                     # [2, B, S, F/tp] or [B, S, F/tp]
        a, act_saved = act.forward(h)                                               # [B, S, F/tp]
        y, out_saved = out_of.forward(a, w["down"], batch)                          # [B, S, D] +tp
        return y, None, {"into": into_saved, "act": act_saved, "out_of": out_saved}

    def backward(dy, dafter, saved, w, batch):
        da, ddown = out_of.backward(dy, saved["out_of"], w["down"], batch)          # [B, S, F/tp]
        dh = act.backward(da, saved["act"])                                         # [2, B, S, F/tp] or [B, S, F/tp]
        dx, grads = into.backward({name: dh}, saved["into"], {name: w[name]}, batch)    # [B, S, D] +tp
        return dx, None, grads | {bias: summed(part) for part, bias in zip(parts(dh), biases)} | {"down": ddown}

    return Layer(forward, backward, inward(config) | {"down": "F/tp D"}, {"down_bias": "D"} if config.mlp_bias else {})
