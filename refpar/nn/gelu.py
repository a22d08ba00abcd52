"""GELU (Hendrycks and Gimpel 2016): x times the chance that a standard normal number lies below x; and its tanh form.

The chance is 1/2 erfc(-x / sqrt(2)), and numpy has no erf.  Its left tail is written Q(-u) = exp(-u**2 / 2) m(u) for u >= 0, where
m, Mills' ratio over sqrt(2 pi), is smooth: a polynomial of degree 18 in t = 1 / (1 + u/4) gives it to rounding, for u from 0 to 9
and, times an exponential below 1e-17, to nothing visible beyond.  The polynomial is found here, from the standard library's erfc.

Backward computes all again from x: nothing but x is saved.
"""
from __future__ import annotations

import math

import numpy as np

SLOPE, FAR, DEGREE = 0.25, 9.0, 18
_LOW = 1 / (1 + SLOPE * FAR)                    # t lies between this and 1


def _polynomial() -> list[float]:
    """The coefficients of m in s, highest first, where s from -1 to 1 is t from _LOW to 1: through Chebyshev's nodes."""
    s = np.cos(np.pi * (np.arange(DEGREE + 1) + 0.5) / (DEGREE + 1))
    u = (1 / (_LOW + (1 - _LOW) * (s + 1) / 2) - 1) / SLOPE
    m = [math.exp(x * x / 2) * math.erfc(x / math.sqrt(2)) / 2 for x in u.tolist()]
    chebyshev = np.polynomial.chebyshev
    return chebyshev.cheb2poly(chebyshev.chebfit(s, m, DEGREE))[::-1].tolist()


POLYNOMIAL = _polynomial()


def normal_forward(x):
    """x -> (chance of less than x, exp(-x**2 / 2)), each as precise in the left tail as elsewhere."""
    s = np.abs(x)
    s *= SLOPE
    s += 1
    np.divide(2 / (1 - _LOW), s, out=s)
    s -= (1 + _LOW) / (1 - _LOW)
    tail = np.full_like(x, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:          # Horner's rule
        tail *= s
        tail += coefficient
    bell = np.multiply(x, x, out=s)
    bell *= -0.5
    np.exp(bell, out=bell)
    tail *= bell
    return np.where(x > 0, 1 - tail, tail), bell


def gelu_forward(x):
    """x -> x Q(x)."""
    y, _ = normal_forward(x)
    y *= x
    return y, {"x": x}


def gelu_backward(dy, saved):
    """Q(x) + x exp(-x**2 / 2) / sqrt(2 pi)."""
    x = saved["x"]
    dx, bell = normal_forward(x)
    bell *= 1 / math.sqrt(2 * math.pi)
    bell *= x
    dx += bell
    dx *= dy
    return dx


ROOT, CUBE = math.sqrt(2 / math.pi), 0.044715


def _tanh(x):
    """tanh(sqrt(2/pi) (x + 0.044715 x**3))."""
    t = x * x
    t *= ROOT * CUBE
    t += ROOT
    t *= x
    return np.tanh(t, out=t)


def gelu_tanh_forward(x):
    """x -> x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x**3))), GPT-2's form."""
    y = _tanh(x)
    y += 1
    y *= x
    y *= 0.5
    return y, {"x": x}


def gelu_tanh_backward(dy, saved):
    """(1 + t)/2 + x/2 (1 - t**2) sqrt(2/pi) (1 + 3 * 0.044715 x**2)."""
    x = saved["x"]
    t, dx = _tanh(x), x * x
    dx *= 3 * ROOT * CUBE
    dx += ROOT
    dx *= x
    dx *= 1 - t
    dx += 1
    t += 1
    dx *= t                                     # (1 + t) (1 + x (1 - t) ...): both terms have that factor
    dx *= 0.5
    dx *= dy
    return dx
