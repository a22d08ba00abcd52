"""A pair of neighbours: every rank's x to the next rank, and gradients to the one before.

    shift               Shard -> Shard          to the next Shard -> Shard          to the one before

It belongs to the table of conjugate pairs in `refpar/comm/pairs.py`; no layer needs it, and pipelines send by their schedule.
"""
from __future__ import annotations

from functools import partial

import numpy as np

from refpar import watch
from refpar.comm.pairs import Pair
from refpar.comm.placement import Shard


def shift(axis, dim: int = 0) -> Pair:
    """Every rank's x goes to the next rank; the first gets zeros, and what the last has goes nowhere.  x of one shape on all ranks,
    seen as an array that is cut along `dim`."""
    return Pair(partial(send_along, axis=axis, step=1), partial(send_along, axis=axis, step=-1), Shard(dim), Shard(dim))


@watch.collective
def send_along(x, axis, step: int):
    """x goes to the rank `step` further on; where nothing arrives, zeros.  Messages 1, but for the rank at the end; elements of x;
    time alpha + n beta."""
    arrived = np.zeros(x.shape, x.dtype)
    watch.held("received", arrived)
    requests = []
    if 0 <= axis.index - step < axis.size:
        requests.append(axis.irecv(arrived, axis.index - step))
    if 0 <= axis.index + step < axis.size:
        requests.append(axis.isend(np.asarray(x, order="C"), axis.index + step))
    for request in requests:
        request.wait()
    return arrived
