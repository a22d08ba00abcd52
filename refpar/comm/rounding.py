"""float16 is added up in float64 and rounded once.

A sum of 11 bits that is rounded on every rank that it passes gets worse with the number of ranks.  So where sums travel, they
travel as float64, four times as many bytes, in which any sum of up to 2**13 addends of float16 is exact; one rounding remains, at
the end.  (Only `direct` sends float16 as it is: there addends travel, and no sums.)
"""
from __future__ import annotations

from functools import wraps

import numpy as np


def travels_as(dtype) -> np.dtype:
    """The dtype of sums on their way."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float16 else dtype)


def rounded_once(function):
    """Decorate `function(x, axis, ...)`, which adds up: it is given x, as one run of memory, in the dtype in which sums travel, and
    its result (an array, or None) is rounded back."""
    @wraps(function)
    def rounding(x, axis, *args, **options):
        x = np.asarray(x)
        total = function(np.asarray(x, travels_as(x.dtype), order="C"), axis, *args, **options)
        return None if total is None else total.astype(x.dtype, copy=False)
    return rounding
