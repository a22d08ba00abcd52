"""A long array to or from one rank, in parts: nobody handles the whole of it more than once.

A binomial tree sends the whole array log2 p times, one after the other.  **van de Geijn's** broadcast sends it in parts, of which
each goes down the tree to one rank (scatter), and then around a ring to all (all_gather).  **Rabenseifner's** reduce is the way
back: reduce_scatter by halving, and the finished parts up a tree (gather).

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), sections 4.3 and 4.4.
"""
from __future__ import annotations

import numpy as np

from refpar.algorithms.gather import gather, scatter
from refpar.algorithms import halving
from refpar.comm import ring, trees
from refpar.comm.rounding import rounded_once
from refpar.comm.shards import slices
from refpar.config import shares


def broadcast(x, axis, root: int = 0):
    """The root's x, on all ranks.  Elsewhere x says only the shape and dtype.

    Messages of the root ceil(log2 p) + p-1; time (log2 p + p-1) alpha + 2(p-1)/p n beta.
    """
    lengths = shares(x.size, axis.size)
    parts = slices(lengths)
    value = np.empty(x.size, x.dtype)
    given = x.reshape(x.size) if axis.index == root else trees.like((x.size,), x.dtype)
    value[parts[axis.index]] = scatter(given, axis, 0, lengths, root)
    ring.all_gather(value, axis, parts)
    return value.reshape(x.shape)


@rounded_once
def reduce(x, axis, root: int = 0, op=np.add):
    """The sum of every rank's x, on the root; None elsewhere.

    Messages log2 p, and one to the parent; time 2 log2 p alpha + 2(p-1)/p n beta + (p-1)/p n gamma.
    """
    lengths = shares(x.size, axis.size)
    part = halving.reduce_scatter(x.reshape(x.size), axis, slices(lengths), op)
    total = gather(part, axis, 0, lengths, root)
    return None if total is None else total.reshape(x.shape)
