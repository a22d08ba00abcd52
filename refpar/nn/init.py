"""Initial weights, each number keyed by its parameter's name and its *global* index: a rank draws its shard alone.

Matrices are normal with deviation 0.02; those that write into the residual stream are smaller by the square root of how many do
(Radford et al. 2019).  Norms start at 1, biases at 0.  Mamba-2 (Dao and Gu 2024) starts with time steps between 1/1000 and 1/10,
evenly spread in their logarithm, and with rates of decay evenly between 1 and 16; Mamba-1 (Gu and Dao 2023) with those steps too,
and with the rates 1, 2, ..., N in each channel.
"""
from __future__ import annotations

import math
from typing import Callable

import numpy as np

from refpar.config import Model
from refpar.nn.chain import Chain
from refpar.nn.keyed import key, normal, uniform

DEVIATION = 0.02
ROUGH = 0.1                                     # deviation of everything in weights for proofs
WRITERS = ("o", "down", "out")                  # into the residual stream
ONES = ("norm", "gate_norm", "skip", "q_norm", "k_norm")
ZEROS = ("bias_x", "bias_B", "bias_C", "conv_bias", "norm_bias", "q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias",
         "down_bias")
TAPS = ("conv_x", "conv_B", "conv_C", "conv")


def initial(config: Model, chain: Chain, seed: int, dtype, cut: Callable | None = None, rough: bool = False) -> dict:
    """Every parameter of the chain's layers: layer -> parameter -> array.

    cut(name, dims) -> the slices of this rank's shard, with name as in "3.attention.q" and dims as in "D HE/tp"; None: the whole.
    rough: for proofs; wider matrices, and norms, biases and skips moved off their 1 and 0, behind which a fault could hide.
    """
    params = {}
    for layer, dims in chain.dims().items():
        params[layer] = {}
        for name, text in dims.items():
            full = f"{layer}.{name}"
            shape = config.shape(text)
            where = _flat_index(shape, cut(full, text) if cut else (slice(None),) * len(shape))
            values = _values(config, name, text, key(seed, "initial", full), where)
            if rough:
                values = _roughened(name, values, key(seed, "rough", full), where)
            params[layer][name] = values.astype(dtype)
    return params


def _flat_index(shape: tuple[int, ...], slices: tuple[slice, ...]) -> np.ndarray:
    """The place of each element of a shard in the whole parameter, counted row by row."""
    where = np.zeros((), np.int64)
    for size, part in zip(shape, slices):
        where = where[..., None] * size + np.arange(size)[part]
    return where


def _values(config: Model, name: str, dims: str, key: int, where) -> np.ndarray:
    """The rule of each parameter, in float64."""
    if name in ONES:
        return np.ones(where.shape)
    if name in ZEROS:
        return np.zeros(where.shape)
    if name == "dt_bias":
        return inverse_softplus(np.exp(_between(math.log(1e-3), math.log(1e-1), key, where)))
    if name == "A_log" and dims == "I/tp N":
        return np.log(1 + where % config.state)
    if name == "A_log":
        return np.log(_between(1, 16, key, where))
    if name == "dt" and dims == "R I/tp":
        return _between(-1, 1, key, where) / math.sqrt(config.dt_rank)
    if name in TAPS:
        return _between(-1, 1, key, where) / math.sqrt(config.conv)
    branches = len(config.pattern) * config.blocks
    return normal(key, where) * (DEVIATION / math.sqrt(branches) if name in WRITERS else DEVIATION)


def _roughened(name: str, values, key: int, where) -> np.ndarray:
    """Noise on what starts at 1 or 0, and a fresh, wider draw of what is normal."""
    if name in ONES or name in ZEROS or name == "A_log":
        return values + ROUGH * normal(key, where)
    if name == "dt_bias" or name in TAPS:
        return values
    return ROUGH * normal(key, where)


def _between(low: float, high: float, key: int, where) -> np.ndarray:
    return low + (high - low) * uniform(key, where)


def inverse_softplus(y) -> np.ndarray:
    """x with log(1 + exp(x)) = y: y + log(1 - exp(-y))."""
    return y + np.log(-np.expm1(-y))
