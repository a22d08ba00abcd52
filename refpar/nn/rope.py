"""Rotary position embedding: pair i of a head's features is turned by the angle position * base**(-2i/E) (Su et al. 2021).

The pairs are neighbours (0, 1), (2, 3), ..., so a head is E/2 complex numbers in memory and the turn is one complex product.
Turning keeps lengths, and its transpose is the turn back: backward multiplies by the conjugates.
Angles are computed in float64 and only then rounded: at position 10,000 a float32 angle would be wrong in its third decimal.
"""
from __future__ import annotations

import numpy as np


def turns(position, width: int, base: float, dtype) -> np.ndarray:
    """exp(i angle) for each token and pair: position [B, S] -> [B, S, 1, E/2] complex; each distinct position is computed once."""
    distinct, where = np.unique(position, return_inverse=True)
    angles = distinct[:, None] * base ** (-np.arange(0, width, 2) / width)          # [positions, E/2]
    table = np.exp(1j * angles).astype(np.result_type(dtype, np.complex64))
    return table[where.reshape(position.shape)][:, :, None]                         # [B, S, 1, E/2]


def rope_forward(x, turn):
    """x [B, S, H, E] turned by `turn` [B, S, 1, E/2]."""
    return (np.ascontiguousarray(x).view(turn.dtype) * turn).view(x.dtype)


def rope_backward(dy, turn):
    """dy [B, S, H, E] -> dx: the turn back."""
    return rope_forward(dy, turn.conj())


def naive_rope(x, position, base: float):
    """The definition, pair by pair with cosine and sine: the judge of the complex form."""
    width = x.shape[-1]
    y = np.empty_like(x)
    for i in range(0, width, 2):
        angle = (position * base ** (-i / width))[:, :, None]                       # [B, S, 1]
        cos, sin = np.cos(angle), np.sin(angle)
        y[..., i] = x[..., i] * cos - x[..., i + 1] * sin
        y[..., i + 1] = x[..., i] * sin + x[..., i + 1] * cos
    return y
