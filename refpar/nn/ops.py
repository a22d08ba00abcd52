"""The small operations of a layer, each forward beside its backward.

`x_forward(x, w) -> y, saved` and `x_backward(dy, saved, w) -> dx, grads`: saved holds activations and never a parameter.  All
leading dims of x are tokens to an op; sizes are read off the arrays, so a rank's shard of a weight passes through unchanged.
float32 stays float32: every constant is a Python number, and numpy lets those follow the array.

A matrix product tells `watch` its 2mnk floating-point operations.  Elementwise work is not counted.
"""
from __future__ import annotations

import math
from typing import Iterator, NamedTuple

import numpy as np

from refpar import watch
from refpar.nn.product import Product


def tokens_of(x) -> int:
    """How many rows x has: the product of all dims but the last."""
    return math.prod(x.shape[:-1])


def flat(x) -> np.ndarray:
    """x [..., J] -> [T, J]."""
    return x.reshape(tokens_of(x), x.shape[-1])


ROWS = 64                       # tokens that elementwise work of many passes takes at a time


def in_rows(count: int) -> Iterator[slice]:
    """The rows of an array, a block after another."""
    return (slice(first, first + ROWS) for first in range(0, count, ROWS))


# ---------------------------------------------------------------------------------------------------------------- linear maps

def matmul(x, w, name: str) -> np.ndarray:
    """x [..., J] w [J, O] -> [..., O]: one product over all tokens, counted under `name`."""
    watch.op(name, 2 * tokens_of(x) * w.shape[0] * w.shape[1])
    return (flat(x) @ w).reshape(*x.shape[:-1], w.shape[1])


def linear_forward(x, w):
    """x [..., J], w [J, O] -> y [..., O]."""
    return matmul(x, w, "linear"), {"x": x}


def linear_backward(dy, saved, w):
    """dy [..., O] -> dx [..., J], and the weight's gradient as a product not yet multiplied."""
    return matmul(dy, w.T, "input gradient"), Product(saved["x"], dy)


def stacked_forward(x, w):
    """n linear maps of the same x: x [..., J], w [n, J, O] -> y [n, ..., O], each map's result contiguous."""
    n, _, width = w.shape
    watch.op("linear", 2 * tokens_of(x) * w.size)
    return np.matmul(flat(x), w).reshape(n, *x.shape[:-1], width), {"x": x}         # [n, ..., O]


def stacked_backward(dy, saved, w):
    """dy [n, ..., O] -> dx [..., J], and a list of n products, which `settle` stacks."""
    dx = matmul(dy[0], w[0].T, "input gradient")
    for dy_i, w_i in zip(dy[1:], w[1:]):
        dx += matmul(dy_i, w_i.T, "input gradient")
    return dx, [Product(saved["x"], dy_i) for dy_i in dy]


# ------------------------------------------------------------------------------------------------------------------ RMS norm

class Squares(NamedTuple):
    """The statistic of a norm over some of its features: their sum of squares [..., 1], and how many they are."""
    total: np.ndarray
    width: int


def squares(x) -> Squares:
    """Partial: the features that are here."""
    return Squares(np.vecdot(x, x)[..., None], x.shape[-1])                         # [..., 1]


def squares_merge(a: Squares, b: Squares) -> Squares:
    """Merge: the features of a and of b.  Identity: Squares(0, 0)."""
    return Squares(a.total + b.total, a.width + b.width)


def squares_finish(s: Squares, eps: float) -> np.ndarray:
    """Finish: 1 / sqrt(mean of squares + eps), [..., 1]."""
    return 1 / np.sqrt(s.total / s.width + eps)


def rmsnorm_forward(x, w, eps: float):
    """x [..., D], w [D] -> x / rms(x) * w (Zhang and Sennrich 2019)."""
    scale = squares_finish(squares(x), eps)                                         # [..., 1]
    y = x * scale
    y *= w
    return y, {"x": x, "scale": scale}


def rmsnorm_backward(dy, saved, w):
    """dy [..., D] -> dx [..., D], dw [D]."""
    x, scale = saved["x"], saved["scale"]
    normed = x * scale
    dw = np.einsum("td,td->d", flat(dy), flat(normed))
    dx = dy * w
    normed *= np.vecdot(dx, normed)[..., None] / x.shape[-1]    # the part of the gradient that only lengthens x
    dx -= normed
    dx *= scale
    return dx, dw


# ----------------------------------------------------------------------------------------------------------------- LayerNorm

def summed(x) -> np.ndarray:
    """x [..., I] -> [I], the sum over all tokens: the gradient of a bias."""
    return flat(x).sum(axis=0)


def layernorm_forward(x, w, b, eps: float):
    """x [..., D], w and b [D] -> (x - mean) / deviation * w + b (Ba, Kiros and Hinton 2016)."""
    normed = x - x.mean(axis=-1, keepdims=True)
    scale = squares_finish(squares(normed), eps)                                    # [..., 1]
    normed *= scale
    y = normed * w
    y += b
    return y, {"normed": normed, "scale": scale}


def layernorm_backward(dy, saved, w):
    """dy [..., D] -> dx [..., D], dw [D], db [D]."""
    normed, scale = saved["normed"], saved["scale"]
    dw = np.einsum("td,td->d", flat(dy), flat(normed))
    dx = dy * w
    along = np.vecdot(dx, normed)[..., None] / dx.shape[-1]
    dx -= dx.mean(axis=-1, keepdims=True)                       # the part of the gradient that only shifts x
    dx -= normed * along                                        # and the part that only lengthens it
    dx *= scale
    return dx, dw, summed(dy)


# ---------------------------------------------------------------------------------------------------------------- SiLU, SwiGLU

def sigmoid(x) -> np.ndarray:
    """1 / (1 + exp(-x)); far to the left exp overflows to infinity, which gives the right 0."""
    s = -x
    with np.errstate(over="ignore"):
        np.exp(s, out=s)
    s += 1
    return np.reciprocal(s, out=s)


def silu_forward(x):
    """x -> x sigmoid(x)."""
    return x * sigmoid(x), {"x": x}


def silu_backward(dy, saved):
    """d silu = s + x s (1 - s) = s (1 + x (1 - s))."""
    x = saved["x"]
    s = sigmoid(x)
    dx = 1 - s
    dx *= x
    dx += 1
    dx *= s
    dx *= dy
    return dx


def swiglu_forward(gate_up):
    """gate_up [2, ..., F] -> silu(gate) * up [..., F] (Shazeer 2020); a few tokens at a time, which stay in the cache."""
    gate, up = map(flat, gate_up)                                                   # [T, F]
    y = np.empty(gate.shape, gate.dtype)
    for rows in in_rows(len(y)):
        part = sigmoid(gate[rows])
        part *= gate[rows]
        np.multiply(part, up[rows], out=y[rows])
    return y.reshape(gate_up.shape[1:]), {"gate_up": gate_up}


def swiglu_backward(dy, saved):
    """dy [..., F] -> [2, ..., F]."""
    gate, up = map(flat, saved["gate_up"])                                          # [T, F]
    dy, both = flat(dy), np.empty((2, *gate.shape), gate.dtype)
    for rows in in_rows(len(dy)):
        s, (dgate, dup) = sigmoid(gate[rows]), both[:, rows]
        np.multiply(gate[rows], s, out=dup)                     # silu(gate)
        np.subtract(1, s, out=dgate)
        dgate *= dup
        dgate += s                                              # its derivative: s + silu (1 - s)
        dgate *= up[rows]
        dgate *= dy[rows]
        dup *= dy[rows]
    return both.reshape(saved["gate_up"].shape)


# ------------------------------------------------------------------------------------------------------------------- soft cap

def softcap_forward(x, cap: float):
    """x -> cap tanh(x / cap): about x while it is small, and never beyond cap (Gemma 2's)."""
    y = x / cap
    np.tanh(y, out=y)
    y *= cap
    return y, {"y": y}


def softcap_backward(dy, saved, cap: float):
    """1 - tanh**2."""
    dx = saved["y"] / cap
    dx *= dx
    np.subtract(1, dx, out=dx)
    dx *= dy
    return dx


# ------------------------------------------------------------------------------------------------------------------ embedding

def embedding_forward(tokens, table, first: int = 0):
    """tokens [...], table [V/tp, D] of the words from `first` on -> x [..., D]; words that are not here give zeros."""
    local = tokens - first
    here = (local >= 0) & (local < len(table))
    if here.all():
        return table[local]
    x = np.zeros((*tokens.shape, table.shape[1]), table.dtype)
    x[here] = table[local[here]]
    return x


def embedding_backward(dx, tokens, table, first: int = 0) -> np.ndarray:
    """dx [..., D] -> dtable [V/tp, D]: each word's row is the sum over its tokens, added in their order.

    A loop over rows: numpy's scattered add is three times slower on rows as long as D.
    """
    dtable, words = np.zeros_like(table), len(table)
    local = (tokens - first).reshape(tokens.size)
    for word, row in zip(local.tolist(), flat(dx)):
        if 0 <= word < words:
            total = dtable[word]            # a view: `dtable[word] += row` would also copy it onto itself
            total += row
    return dtable
