"""Every rank to every other, one step after the other.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4.2.
"""
from __future__ import annotations

import numpy as np

from refpar.comm.direct import others, room


def exchange(blocks, axis, shapes) -> list:
    """The same messages, one step after the other: only one block is under way at a time, which spares a crowded network."""
    arrived = room(blocks, axis, shapes)
    for source, to in zip(others(axis, -1), others(axis, 1)):
        coming = axis.irecv(arrived[source], source)
        axis.send(np.asarray(blocks[to], order="C"), to)
        coming.wait()
    return arrived
