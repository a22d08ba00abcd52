"""Keyed randomness: a number is a pure function of what it is for.

`key(seed, purpose, name, step)` is a digest; a draw mixes it with the *global* index of the element.  Nothing is streamed and no
state is kept: a rank draws its shard alone and has that part of the whole, on any mesh, and recomputation draws the same again.

The mixing is the finaliser of SplitMix64 (Steele, Lea and Flood 2014), a bijection of 64-bit words in which each bit of the input
flips each bit of the output with probability near one half.
"""
from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)         # 2**64 / golden ratio: spreads small integers over the word


def key(seed: int, purpose: str, name: str, step: int = 0) -> int:
    """64 bits of a digest: other words in any place give an unrelated key."""
    text = repr((int(seed), purpose, name, int(step)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(h):
    """The finaliser, on an array of uint64 that is ours to overwrite."""
    h ^= h >> np.uint64(30)
    h *= np.uint64(0xBF58476D1CE4E5B9)
    h ^= h >> np.uint64(27)
    h *= np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return h


def bits(key: int, *parts) -> np.ndarray:
    """64 random bits for each element of the broadcast of `parts`, integer arrays that together say which element it is.

    Each part is mixed in before the next is broadcast, so the small leading ones cost little.
    """
    h = np.full(1, key, np.uint64)
    for part in parts:
        h = _mix((h ^ np.asarray(part).astype(np.uint64)) * _GOLDEN + _GOLDEN)      # wraps, as arrays of uint64 do
    return h


def uniform(key: int, *parts) -> np.ndarray:
    """Uniform in [0, 1), float64, multiples of 2**-53."""
    return (bits(key, *parts) >> np.uint64(11)) * 2.0**-53


def normal(key: int, *parts) -> np.ndarray:
    """Standard normal, float64, by Box and Muller (1958): a length and an angle from two uniforms of the same element."""
    length = np.sqrt(-2 * np.log1p(-uniform(key, *parts, 0)))
    return length * np.cos(2 * np.pi * uniform(key, *parts, 1))


def integers(key: int, size: int, *parts) -> np.ndarray:
    """Integers from 0 to size-1, int64; uneven by at most size / 2**53."""
    return np.floor(uniform(key, *parts) * size).astype(np.int64)
