"""Equal after a step: the bound of the gradients, carried through clipping and the optimizer, element by element.

AdamW divides each gradient by its own size, so where a gradient is small a rounding error moves the weight by as much as a step,
and one bound for a whole tensor says nothing.  Here each element has an interval: two runs whose gradients differ by at most
`dg` have states after the step that differ by at most what these functions return.  Where the derivative is large the interval is
taken, not the derivative, so the bound is safe; where a gradient stands out of its own error it is about as tight as the
derivative.  With SGD the plain bound holds, times the rate.

In the formulas a name with a d before it is the bound of the name: |g' - g| <= dg.

Shapes: any, alike.  Bounds are float64, in the units of what they bound.
"""
from __future__ import annotations

import math

import numpy as np

from refpar.nn.optimizer import clip_factor, squared
from refpar.oracle.equal import bound, leaves

ROUNDINGS = 8       # of each line of a step: at most four operations in each of the two runs


def gradient_bounds(grads: dict, n: int) -> dict:
    """The one bound of `equal` for each gradient, as a nest of numbers: n is the longest sum behind them."""
    return _each(lambda g: bound(g.dtype, n, float(np.max(np.abs(g), initial=0.0))), grads)


def clip_bounds(grads: dict, dg: dict, clip: float) -> tuple[dict, dict]:
    """Gradients and their bounds after clipping by global norm, which multiplies them by c.

    The norm is off by at most the norm of dg (triangle inequality), which puts c between two numbers:
    |c' g' - c g| <= c_high dg + |c' - c| |g|.
    """
    norm = math.sqrt(sum(squared(g) for _, g in leaves(grads)))
    dnorm = math.sqrt(sum(squared(np.broadcast_to(d, g.shape)) for (_, d), (_, g) in zip(leaves(dg), leaves(grads))))
    c, low, high = (clip_factor(x, clip) for x in (norm, norm + dnorm, max(norm - dnorm, 0.0)))
    off = max(high - c, c - low)
    return _each(lambda g: g * c, grads), _each(lambda g, d: high * d + (off + _rounding(g)) * np.abs(g), grads, dg)


def sgd_bounds(p, g, dp, dg, rate: float, decay: float = 0.0):
    """dp after p' = p - rate (g + decay p)."""
    return abs(1 - rate * decay) * dp + rate * dg + _rounding(p) * (np.abs(p) + rate * np.abs(g))


def adamw_bounds(p, g, m, v, dp, dg, dm, dv, step: int, rate: float, decay: float, training):
    """(dp, dm, dv) after one step of AdamW, step = 0 for the first; m and v are sums over gradients that began at zero.

        m' = b1 m + (1-b1) g            v' = b2 v + (1-b2) g^2
        u  = m'/(1-b1^t) / (sqrt(v'/(1-b2^t)) + eps)            p' = p - rate (u + decay p)

    u lies between the quotients of the corners of m' and v', and between -cap and cap (see `largest_update`).
    """
    b1, b2, t = training.beta1, training.beta2, step + 1
    near = _rounding(p)
    p, g, m, v = (x.astype(np.float64) for x in (p, g, m, v))
    m1 = b1 * m + (1 - b1) * g
    dm1 = b1 * dm + (1 - b1) * dg + near * (b1 * np.abs(m) + (1 - b1) * np.abs(g))
    v1 = b2 * v + (1 - b2) * g**2
    dv1 = b2 * dv + (1 - b2) * (2 * np.abs(g) + dg) * dg + near * v1

    mean, dmean = np.abs(m1) / (1 - b1**t), dm1 / (1 - b1**t)
    root, low, high = (np.sqrt(np.maximum(x, 0) / (1 - b2**t)) + training.eps for x in (v1, v1 - dv1, v1 + dv1))
    least = mean - dmean                                                    # below 0 where the sign is not certain
    u = mean / root
    du = np.maximum((mean + dmean) / low - u, u - least / np.where(least > 0, high, low))
    du = np.minimum(du, u + largest_update(step, b1, b2)) + near * u
    return abs(1 - rate * decay) * dp + rate * du + near * (np.abs(p) + rate * u), dm1, dv1


def largest_update(step: int, b1: float, b2: float) -> float:
    """The largest |m'| / sqrt(v'), both corrected, of any gradients g_1 ... g_t: by the Cauchy-Schwarz inequality

        (sum a_i g_i)^2 <= sum(a_i^2 / c_i) sum(c_i g_i^2),   a_i = (1-b1) b1^(t-i),   c_i = (1-b2) b2^(t-i)
    """
    t = step + 1
    ratios = sum((b1 * b1 / b2) ** i for i in range(t)) if b2 else math.inf     # a v without memory holds no m with one
    return (1 - b1) / (1 - b1**t) * math.sqrt((1 - b2**t) / (1 - b2) * ratios)


def step_bounds(state, grads: dict, dg: dict, rate: float, training, bounds=None) -> tuple[dict, dict, dict]:
    """Bounds of (params, m, v) after one training step, as nests of arrays.

    state: params, m, v and step before it; grads and dg: raw, before clipping; bounds: those of params, m, v before (None: exact).
    """
    grads, dg = clip_bounds(grads, dg, training.clip)
    dp, dm, dv = bounds or (_each(lambda p: 0.0, state.params),) * 3

    def of(p, g, m, v, dp, dg, dm, dv):
        decay = training.decay if p.ndim >= 2 else 0.0
        if training.optimizer == "sgd":
            return sgd_bounds(p, g, dp, dg, rate, decay), dm, dv
        return adamw_bounds(p, g, m, v, dp, dg, dm, dv, state.step, rate, decay, training)

    after = _each(of, state.params, grads, state.m, state.v, dp, dg, dm, dv)
    return tuple(_each(lambda bounds: bounds[i], after) for i in range(3))


def distance_within(a, b, limit) -> float:
    """The largest |a - b| in units of an elementwise limit; NaN, or a difference where the limit is 0, is inf."""
    with np.errstate(all="ignore"):
        apart = np.abs(np.subtract(a, b, dtype=np.float64)) / limit
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(np.max(np.where(np.equal(a, b), 0.0, apart), initial=0.0))


def _rounding(array) -> float:
    """What the operations of one line of a step may lose, relative to its addends."""
    return ROUNDINGS * float(np.finfo(array.dtype).eps)


def _each(function, tree, *others):
    """`function` of the leaves at each place of nests of the same names."""
    if isinstance(tree, dict):
        return {name: _each(function, tree[name], *(other[name] for other in others)) for name in tree}
    return function(tree, *others)
