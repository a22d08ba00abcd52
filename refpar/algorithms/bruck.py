"""Bruck: log2 p rounds for any number of ranks, by turning everything so that each rank stands first.

Idea: seen from itself, every rank is number 0, and the others are 1, 2, ..., p-1 steps away.  So all do the same in each round, and
no rank is left over where p is no power of 2 (as in `refpar/comm/doubling.py`).  The price is a copy that turns the result back.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing
systems" (1997).
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm.shards import slices


def rounds(p: int) -> list[int]:
    """1, 2, 4, ... below p."""
    return [1 << k for k in range((p - 1).bit_length())]


def all_gather(flat, axis, parts):
    """In place: rank i has filled part i of `flat`.  After round k it has the parts of the 2**(k+1) ranks from itself on.

    In each round it sends all that it has, or as much as is still missing, to the rank 2**k before it, and hears from the one 2**k
    after it.  Messages ceil(log2 p); elements (p-1)/p T; time ceil(log2 p) alpha + (p-1)/p n beta.
    """
    p = axis.size
    order = [(axis.index + step) % p for step in range(p)]                              # as seen from here
    turned, places = np.empty_like(flat), slices([parts[rank].stop - parts[rank].start for rank in order])
    watch.held("received", turned)
    turned[places[0]] = flat[parts[axis.index]]
    for reach in rounds(p):
        count = min(reach, p - reach)
        coming = axis.irecv(turned[places[reach].start:places[reach + count - 1].stop], (axis.index + reach) % p)
        axis.send(turned[:places[count - 1].stop], (axis.index - reach) % p)
        coming.wait()
    for rank, place in zip(order, places):
        flat[parts[rank]] = turned[place]


def all_to_all(blocks, axis, shapes, sizes) -> list:
    """Block j of every rank to rank j; sizes[i][j]: elements from rank i to rank j, for all of them.

    A block that must go d steps to the right takes the bits of d one by one: in round k all blocks with bit k set move 2**k ranks
    on, in one message.  Messages ceil(log2 p); elements some ceil(log2 p)/2 of all blocks: each is sent as often as its d has bits;
    time about log2 p (alpha + n/2 beta), for n bytes of blocks on each rank.
    """
    p, dtype = axis.size, blocks[axis.index].dtype
    moving = [blocks[(axis.index + steps) % p] for steps in range(p)]                   # by how far they go
    moving = [moving[0], *(np.asarray(block, order="C").reshape(block.size) for block in moving[1:])]
    for reach in rounds(p):
        travellers = [steps for steps in range(p) if steps & reach]
        leaving = np.concatenate([moving[steps] for steps in travellers])
        places = slices([arriving_size(axis.index, steps, reach, sizes) for steps in travellers])
        arriving = np.empty(places[-1].stop, dtype)
        watch.held("received", [moving[1:], arriving])
        coming = axis.irecv(arriving, (axis.index - reach) % p)
        axis.send(leaving, (axis.index + reach) % p)
        coming.wait()
        for steps, place in zip(travellers, places):
            moving[steps] = arriving[place]
    return [moving[(axis.index - source) % p].reshape(shape) for source, shape in enumerate(shapes)]


def arriving_size(index: int, steps: int, reach: int, sizes) -> int:
    """Elements of the block, of all that go `steps` to the right, that reaches rank `index` in the round of `reach`."""
    source = (index - (steps & (2 * reach - 1))) % len(sizes)                           # so far it has gone these bits of its way
    return sizes[source][(source + steps) % len(sizes)]
