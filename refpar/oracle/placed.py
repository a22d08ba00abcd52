"""What a placement means, of the parts that all ranks hold: the whole value, and the inner product of a gradient and a value."""
from __future__ import annotations

import numpy as np

from refpar.comm.placement import Placement


def whole(parts: list, placement: Placement):
    """What a placement means: the value whose parts the ranks of an axis hold, in their order."""
    if placement.kind == "Shard":
        return np.concatenate(parts, axis=placement.dim)
    if placement.kind == "Partial":
        return np.sum(parts, axis=0, dtype=parts[0].dtype)
    return parts[0]


def inner(gradients: list, values: list, placement: Placement):
    """<gradient, value> of the whole, from the parts that all ranks hold: values lie as `placement`, gradients as its dual.

    Whatever the placement, each rank's own product is an addend of it.  Only under Invariant all ranks have the same product, and
    it counts once.
    """
    products = [np.sum(np.multiply(gradient, value, dtype=np.float64)) for gradient, value in zip(gradients, values, strict=True)]
    return products[0] if placement.kind == "Invariant" else sum(products)
