"""The residual stream, and the one function that adds a layer to it.

    x + drop(leave(layer(enter(norm(x)))) + bias)

Within `enter` and `leave` stand the layer's own parameters; the norm and the output's bias stand outside them, where each rank has
the whole width: inside, where y is an addend, each rank would add the bias again.
"""
from __future__ import annotations

from refpar.nn.ops import summed
from refpar.nn.pieces import Piece
from refpar.nn.seams import Layer, Seams


def residual(layer: Layer, seams: Seams, norm: Piece) -> Layer:
    """The layer on the residual stream: x [B, S, D] -> [B, S, D].  Outside its seams it has its output's bias, or nothing."""
    def forward(x, w, batch, before):
        h, norm_saved = norm.forward(x, w)                                          # [B, S, D]
        y, after, inner = layer.forward(seams.enter.forward(h, batch), w, batch, before)
        y = seams.leave.forward(y, batch)                                           # [B, S, D]
        for bias in layer.outside:
            y = y + w[bias]
        return x + seams.drop.forward(y, seams.mine(batch)), after, {"norm": norm_saved, "inner": inner}

    def backward(dy, dafter, saved, w, batch):
        dbranch = seams.drop.backward(dy, seams.mine(batch))
        biases = {bias: summed(dbranch) for bias in layer.outside}
        dh, dbefore, grads = layer.backward(seams.leave.backward(dbranch, batch), dafter, saved["inner"], w, batch)
        dx, norms = norm.backward(seams.enter.backward(dh, batch), saved["norm"], w)
        return dy + dx, dbefore, grads | biases | norms

    return Layer(forward, backward, layer.inside, layer.outside | norm.dims, layer.start)


def absent() -> Layer:
    """A layer that was cut out: the residual stream passes it by."""
    def forward(x, w, batch, before):
        return x, None, {}

    def backward(dy, dafter, saved, w, batch):
        return dy, None, {}

    return Layer(forward, backward, {}, {})
