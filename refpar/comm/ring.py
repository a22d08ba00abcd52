"""Rings: every rank hears from its left neighbour and tells its right one.

Idea: nobody needs the whole sum before it is finished.  In p-1 steps a sum of each part travels once around the ring and grows
(reduce_scatter); in p-1 more the finished parts travel around (all_gather).  No rank ever sends more than another, nor a byte more
than must be sent; but the steps grow with p, so small arrays have better ways (`refpar/comm/doubling.py`).

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm.rounding import rounded_once
from refpar.comm.shards import slices
from refpar.config import shares


@watch.collective
@rounded_once
def all_reduce(x, axis, op=np.add):
    """The sum of every rank's x, on all ranks: reduce_scatter of the flattened array, and all_gather.

    Messages 2(p-1); elements 2(p-1)/p T, the lower bound; time 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.
    """
    parts = slices(shares(x.size, axis.size))
    total = np.empty(x.size, x.dtype)
    total[parts[axis.index]] = reduce_scatter(x.reshape(x.size), axis, parts, op)
    all_gather(total, axis, parts)
    return total.reshape(x.shape)


@rounded_once
def reduce_scatter(flat, axis, parts, op=np.add):
    """Part i of the sum of every rank's `flat`, on rank i.

    Messages p-1; elements (p-1)/p T; time (p-1) alpha + (p-1)/p n (beta + gamma).  Part i sets out on rank i+1, and each rank on
    its way adds its own addend; it ends, complete, on the rank that keeps it.  In each of the p-1 steps every rank sends one sum to
    the right and receives another from the left.
    """
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    longest = max(part.stop - part.start for part in parts)
    scratch = [np.empty(longest, flat.dtype) for _ in range(2)]                         # one is sent while the other is filled
    watch.held("received", scratch)
    travelling = flat[parts[left]]
    for step in range(axis.size - 1):
        mine = flat[parts[(axis.index - 2 - step) % axis.size]]
        arriving = scratch[step % 2][:mine.size]
        coming = axis.irecv(arriving, left)
        going = axis.isend(travelling, right)
        coming.wait()
        going.wait()
        travelling = op(arriving, mine, out=arriving if step + 2 < axis.size else None)     # what stays is my part, and no scratch
    return travelling


def all_gather(flat, axis, parts):
    """In place: rank i has filled part i of `flat`.  Messages p-1; elements (p-1)/p T; time (p-1) alpha + (p-1)/p n beta.

    In p-1 steps each part travels around the ring: every rank sends on, in each step, what it received in the step before.
    """
    watch.held("received", flat)
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    for step in range(axis.size - 1):
        coming = axis.irecv(flat[parts[(axis.index - 1 - step) % axis.size]], left)
        going = axis.isend(flat[parts[(axis.index - step) % axis.size]], right)
        coming.wait()
        going.wait()
