"""all_reduce by the binomial tree of `refpar/comm/trees.py`: the sum goes up to rank 0, and down again.

As few rounds as a tree has, twice; recursive doubling (`refpar/comm/doubling.py`) has the sum everywhere after once.
"""
from __future__ import annotations

import numpy as np

from refpar.comm.rounding import rounded_once
from refpar.comm.trees import broadcast, reduce


@rounded_once
def all_reduce(x, axis, op=np.add):
    """Up to rank 0 and down again.  Time 2 ceil(log2 p) (alpha + n beta) + ceil(log2 p) n gamma."""
    total = reduce(x, axis, 0, op)
    return broadcast(x if total is None else total, axis)
