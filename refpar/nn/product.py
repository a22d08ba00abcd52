"""The weight gradient of a linear map, put off: y = x W has dW = x' dy, and `Product(x, dy)` is that, not yet multiplied.

Backward is two halves: B gives the input's gradient, which the layer below waits for; W multiplies out the weights' gradients,
which nobody waits for.  Zero-bubble schedules run them apart; ordinary backward runs `settle` at once (Qi et al. 2023).
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch


class Product(NamedTuple):
    """x [..., J] and dy [..., O], whose product over all leading dims is a gradient [J, O]."""
    x: np.ndarray
    dy: np.ndarray


def multiply(product: Product) -> np.ndarray:
    """x' dy [J, O]: 2*T*J*O floating-point operations."""
    x, dy = product
    tokens = int(np.prod(x.shape[:-1]))
    watch.op("weight gradient", 2 * tokens * x.shape[-1] * dy.shape[-1])
    return x.reshape(tokens, x.shape[-1]).T @ dy.reshape(tokens, dy.shape[-1])      # [J, O]


def settle(grads):
    """Every Product of a nest of gradients, multiplied; a list of them (a stacked weight) becomes one array, stacked."""
    if isinstance(grads, dict):
        return {name: settle(grad) for name, grad in grads.items()}
    if isinstance(grads, Product):
        return multiply(grads)
    if isinstance(grads, list):
        return np.stack([settle(grad) for grad in grads])
    return grads
