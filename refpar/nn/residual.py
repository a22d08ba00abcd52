"""The residual stream, and the one function that adds a layer to it.

    x + drop(leave(layer(enter(norm(x)))))

Within `enter` and `leave` stand the layer's own parameters; the norm stands outside them, where each rank has the whole width.
"""
from __future__ import annotations

from refpar.nn.ops import rmsnorm_backward, rmsnorm_forward
from refpar.nn.seams import Layer, Seams


def residual(layer: Layer, seams: Seams, eps: float) -> Layer:
    """The layer on the residual stream: x [B, S, D] -> [B, S, D]."""
    def forward(x, w, batch, before):
        h, norm = rmsnorm_forward(x, w["norm"], eps)                                # [B, S, D]
        y, after, inner = layer.forward(seams.enter.forward(h), w, batch, before)
        y = seams.drop.forward(seams.leave.forward(y), batch)                       # [B, S, D]
        return x + y, after, {"norm": norm, "inner": inner}

    def backward(dy, dafter, saved, w, batch):
        dbranch = seams.leave.backward(seams.drop.backward(dy, batch))
        dh, dbefore, grads = layer.backward(dbranch, dafter, saved["inner"], w, batch)
        dx, dnorm = rmsnorm_backward(seams.enter.backward(dh), saved["norm"], w["norm"])
        return dy + dx, dbefore, grads | {"norm": dnorm}

    return Layer(forward, backward, layer.inside, layer.outside | {"norm": "D"}, layer.start)


def absent() -> Layer:
    """A layer that was cut out: the residual stream passes it by."""
    def forward(x, w, batch, before):
        return x, None, {}

    def backward(dy, dafter, saved, w, batch):
        return dy, None, {}

    return Layer(forward, backward, {}, {})
