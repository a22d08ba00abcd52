"""Rotary position embedding: pair i of a head's features is turned by the angle position * base**(-2i/E) (Su et al. 2021).

A pair is a complex number and the turn a complex product; it keeps lengths, and its transpose is the turn back: backward multiplies
by the conjugates.  Pairs are neighbours (0, 1), (2, 3), ..., which lie in memory as complex numbers do, or halves (0, E/2),
(1, E/2+1), ..., as in the checkpoints that Hugging Face holds.

A model that learned short texts reads longer ones when its pairs turn more slowly; there are three ways to slow them.

Angles are computed in float64 and only then rounded: at position 10,000 a float32 angle would be wrong in its third decimal.
"""
from __future__ import annotations

import numpy as np

from refpar.config import Model
from refpar.nn.seams import Pair

# ---------------------------------------------------------------------------------------------------------- how fast pairs turn

def unscaled(config: Model):
    """As they are."""
    return powers(config.head_width, config.rope_base)


def linear(config: Model):
    """All pairs slower by the factor: positions are interpolated (Chen et al. 2023)."""
    return unscaled(config) / config.rope_factor


def ntk(config: Model):
    """A larger base, so that the last pair is slower by the factor and the first as fast as before (bloc97 2023)."""
    width = config.head_width
    return powers(width, config.rope_base * config.rope_factor ** (width / (width - 2)))


def llama3(config: Model):
    """By how often a pair turns in the length of the first training: often, and it stays; seldom, and it is slower by the whole
    factor; between, a mean of both (Llama 3.1's)."""
    fast = unscaled(config)
    times = config.rope_original * fast / (2 * np.pi)
    kept = np.clip((times - config.rope_low) / (config.rope_high - config.rope_low), 0, 1)
    return fast * (kept + (1 - kept) / config.rope_factor)


def powers(width: int, base: float):
    """base**(-2i/E), for each pair i."""
    return base ** (-np.arange(0, width, 2) / width)                                # [E/2]


SCALINGS = {"none": unscaled, "linear": linear, "ntk": ntk, "llama3": llama3}


def turns(position, frequency, dtype) -> np.ndarray:
    """exp(i angle) for each token and pair: position [B, S], frequency [E/2] -> [B, S, 1, E/2] complex; each distinct position is
    computed once, of a dense range every one."""
    first, last = int(position.min(initial=0)), int(position.max(initial=0))
    if last - first <= position.size:
        distinct, where = np.arange(first, last + 1), position - first
    else:
        distinct, where = np.unique(position, return_inverse=True)
    angles = distinct[:, None] * frequency                                          # [positions, E/2]
    table = np.empty(angles.shape, np.result_type(dtype, np.complex64))
    table.real, table.imag = np.cos(angles), np.sin(angles)
    return table[where.reshape(position.shape)][:, :, None]                         # [B, S, 1, E/2]


# --------------------------------------------------------------------------------------------------------------------- the turn

def rope_forward(x, turn):
    """x [B, S, H, E] turned by `turn` [B, S, 1, E/2], in pairs of neighbours."""
    return (np.ascontiguousarray(x).view(turn.dtype) * turn).view(x.dtype)


def rope_backward(dy, turn):
    """dy [B, S, H, E] -> dx: the turn back."""
    return rope_forward(dy, turn.conj())


def halves_forward(x, turn):
    """x [B, S, H, E] turned by `turn` [B, S, 1, E/2], in pairs of one feature from each half."""
    half = x.shape[-1] // 2
    pairs = np.empty((*x.shape[:-1], half), turn.dtype)                             # [B, S, H, E/2] or [B, S, K, E/2]
    pairs.real, pairs.imag = x[..., :half], x[..., half:]
    pairs *= turn
    return np.concatenate([pairs.real, pairs.imag], axis=-1)                        # [B, S, H, E] or [B, S, K, E]


def halves_backward(dy, turn):
    """dy [B, S, H, E] -> dx: the turn back."""
    return halves_forward(dy, turn.conj())


PAIRS = {"interleaved": Pair(rope_forward, rope_backward), "halves": Pair(halves_forward, halves_backward)}


def unturned(x, turn):
    """x as it is: positions are told in another way, or not at all."""
    return x


def rotary(config: Model):
    """(turns_of(position, dtype), the pair that turns by them); for a model without rotary positions both do nothing."""
    if config.positions != "rope":
        return lambda position, dtype: None, Pair(unturned, unturned)
    frequency = SCALINGS[config.rope_scaling](config)
    return lambda position, dtype: turns(position, frequency, dtype), PAIRS[config.rope_pairs]
