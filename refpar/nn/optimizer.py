"""SGD and AdamW as functions: weights, gradients and state go in, new ones come out.

Gradients are whole sums already: nothing is averaged or rescaled here but by clipping, with a norm that the caller summed over
whatever it is sharded over.  Parameters of two dims or more decay, those of one dim (norms, biases) do not.
"""
from __future__ import annotations

import math
from operator import itemgetter

import numpy as np

from refpar.config import Training

BLOCK = 1 << 14                 # elements handled at a time, so that the passes over them stay in the cache


def squared(grad) -> float:
    """The sum of squares of one gradient, or of this rank's shard of it."""
    flat = grad.astype(np.float64, copy=False).ravel()
    return float(flat @ flat)


def clip_factor(norm: float, clip: float) -> float:
    """By what gradients of this global norm are multiplied; clip 0 clips nothing.  The 1e-6 is PyTorch's."""
    return min(1.0, clip / (norm + 1e-6)) if clip else 1.0


def clipped(grads: dict, norm: float, clip: float) -> dict:
    """Gradients whose global norm is at most `clip`."""
    factor = clip_factor(norm, clip)
    return grads if factor == 1 else _each(lambda grad: grad * factor, grads)


def updated(params: dict, grads: dict, m: dict, v: dict, step: int, rate: float, training: Training):
    """One step, the `step`-th from 0, of the optimizer that `training` names -> params, m, v, step + 1.  SGD passes m and v on."""
    if training.optimizer == "sgd":
        return _each(lambda w, g: sgd(w, g, rate, training), params, grads), m, v, step + 1
    new = _each(lambda *arrays: adamw(*arrays, step + 1, rate, training), params, grads, m, v)
    return *(_each(itemgetter(i), new) for i in range(3)), step + 1


def _each(function, *trees: dict) -> dict:
    """`function` of the arrays of the same name, for every name."""
    return {layer: {name: function(*(tree[layer][name] for tree in trees)) for name in trees[0][layer]} for layer in trees[0]}


def decay_of(w, rate: float, training: Training) -> float:
    """By what a weight is multiplied before its step: decay apart from the gradient (Loshchilov and Hutter 2019)."""
    return 1 - rate * training.decay if w.ndim > 1 else 1.0


def sgd(w, g, rate: float, training: Training) -> np.ndarray:
    """w [..] -> w - rate g, after decay."""
    return w * decay_of(w, rate, training) - g * rate


def adamw(w, g, m, v, count: int, rate: float, training: Training):
    """-> new w, m, v, shaped like the old; `count` is 1 in the first step."""
    new = tuple(np.empty_like(a, order="C") for a in (w, m, v))
    fresh, given = [a.reshape(a.size) for a in new], [a.reshape(a.size) for a in (w, g, m, v)]
    keep = decay_of(w, rate, training)
    for begin in range(0, w.size, BLOCK):
        part = slice(begin, begin + BLOCK)
        _adamw_block(*(a[part] for a in fresh), *(a[part] for a in given), keep, count, rate, training)
    return new


def _adamw_block(w_out, m_out, v_out, w, g, m, v, keep: float, count: int, rate: float, training: Training):
    """Writes the new w, m and v of a block of elements."""
    beta1, beta2 = training.beta1, training.beta2
    np.multiply(m, beta1, out=m_out)
    m_out += g * (1 - beta1)
    np.multiply(v, beta2, out=v_out)
    squares = g * g
    squares *= 1 - beta2
    v_out += squares
    step = np.sqrt(v_out, out=squares)
    step *= 1 / math.sqrt(1 - beta2**count)         # both moments start at 0: divide by the weight that they have gathered
    step += training.eps
    np.divide(m_out, step, out=step)
    step *= rate / (1 - beta1**count)
    np.multiply(w, keep, out=w_out)
    w_out -= step
