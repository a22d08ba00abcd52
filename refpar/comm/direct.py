"""Every rank to every other, without a middleman: blocks, and sums of blocks.

Nothing is forwarded, so the bytes are the least that an exchange can have, and the messages the most: p-1 of each rank.  In step s
rank i sends to i+s and receives from i-s, so that no rank is asked by two at once.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4.2.
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm import ring
from refpar.comm.rounding import travels_as
from refpar.comm.shards import slices
from refpar.config import shares


def exchange(blocks, axis, shapes) -> list:
    """Block j of every rank to rank j, all steps posted together, so that who is late holds up nobody else.

    Messages p-1; elements all but the own block; time (p-1) alpha + (p-1)/p n beta, for n bytes of blocks on each rank.
    """
    arrived = room(blocks, axis, shapes)
    requests = [axis.irecv(arrived[source], source) for source in others(axis, -1)]
    requests += [axis.isend(np.asarray(blocks[to], order="C"), to) for to in others(axis, 1)]
    for request in requests:
        request.wait()
    return arrived


def others(axis, way: int) -> list[int]:
    """The other ranks, the nearest to the right (1) or to the left (-1) first."""
    return [(axis.index + way * step) % axis.size for step in range(1, axis.size)]


def room(blocks, axis, shapes) -> list:
    """Where the others' blocks will arrive, in the order of ranks, beside the own block."""
    mine = blocks[axis.index]
    arrived = [mine if source == axis.index else np.empty(shape, mine.dtype) for source, shape in enumerate(shapes)]
    watch.held("received", arrived[:axis.index] + arrived[axis.index + 1:])
    return arrived


def reduce_scatter(flat, axis, parts, op=np.add):
    """Every rank sends its addend of part j straight to rank j, which adds them up, in the order of ranks, and rounds once.

    As many messages and bytes as in a ring, of float16 as of any other dtype: it is addends that travel, and no sums.
    Time (p-1) alpha + (p-1)/p n (beta + gamma).
    """
    own = flat[parts[axis.index]]
    addends = exchange([flat[part] for part in parts], axis, [own.shape] * axis.size)
    return op.reduce(addends, axis=0, dtype=travels_as(flat.dtype)).astype(flat.dtype, copy=False)


def all_reduce(x, axis, op=np.add):
    """That, and the finished parts around a ring.  Time 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma."""
    parts = slices(shares(x.size, axis.size))
    total = np.empty(x.size, x.dtype)
    total[parts[axis.index]] = reduce_scatter(x.reshape(x.size), axis, parts, op)
    ring.all_gather(total, axis, parts)
    return total.reshape(x.shape)
