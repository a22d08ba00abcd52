"""Pieces of a layer, with their parameters by name.  Which one stands in its place is decided once, where the layer is built.

    forward(x, w) -> y, saved       backward(dy, saved, w) -> dx, grads       dims: parameter -> dims

w is the whole layer's dict of parameters; grads has the piece's own.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

from refpar.config import Model
from refpar.nn.ops import layernorm_backward, layernorm_forward, rmsnorm_backward, rmsnorm_forward


class Piece(NamedTuple):
    """A map with parameters."""
    forward: Callable
    backward: Callable
    dims: dict[str, str]


def _passed(x, w):
    return x, {}


def _passed_back(dy, saved, w):
    return dy, {}


PASSED = Piece(_passed, _passed_back, {})


def rms_norm(name: str, dims: str, eps: float) -> Piece:
    """The RMS norm of the last dim."""
    def forward(x, w):
        return rmsnorm_forward(x, w[name], eps)

    def backward(dy, saved, w):
        dx, dw = rmsnorm_backward(dy, saved, w[name])
        return dx, {name: dw}

    return Piece(forward, backward, {name: dims})


def layer_norm(name: str, dims: str, eps: float) -> Piece:
    """LayerNorm of the last dim, with a weight and a bias."""
    bias = f"{name}_bias"

    def forward(x, w):
        return layernorm_forward(x, w[name], w[bias], eps)

    def backward(dy, saved, w):
        dx, dw, db = layernorm_backward(dy, saved, w[name])
        return dx, {name: dw, bias: db}

    return Piece(forward, backward, {name: dims, bias: dims})


def norm_of(config: Model) -> Piece:
    """The norm that stands before each layer and at the end."""
    return {"rms": rms_norm, "layer": layer_norm}[config.norm]("norm", "D", config.norm_eps)
