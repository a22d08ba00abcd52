"""Binomial trees: broadcast and reduce, from send and recv alone.

Idea: in each round every rank that has the value passes it on, so that those who have it double.  The root is place 0, the rank
`d` after it (around the axis) place d.  The parent of a place is that place without its lowest 1 bit, its children are the places
with one more bit below it:

    place   0          its children 1, 2, 4, ...         Under a place stand, in one run, the places up to the next one with the
            |- 1       place 6 = 110: parent 4 = 100      same parent: 4 holds 4 to 7.  Gather and scatter rest on that
            |- 2 - 3   its child 7 = 111                  (`refpar/algorithms/gather.py`).
            |- 4 - 5
               |- 6 - 7

A tree takes ceil(log2 p) rounds where a ring takes p-1, and moves more: right for small values and few calls.  Notation and laws
as in `refpar/comm/collectives.py`; formulas for one rank in `refpar/plan/volume.py`.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), sections 4.1 and 4.6.
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm.rounding import rounded_once


def parent(place: int) -> int:
    """The place without its lowest 1 bit; of the root itself, 0."""
    return place & (place - 1)


def children(place: int, p: int) -> list[int]:
    """The nearest child first."""
    found, bit = [], 1
    while place & bit == 0 and place + bit < p:
        found.append(place + bit)
        bit *= 2
    return found


def place_of(axis, root: int, call: str) -> int:
    """How far this rank stands after the root."""
    if not 0 <= root < axis.size:
        raise ValueError(f"{call} on {axis.name}: root {root} must be an index from 0 to {axis.size - 1}")
    return (axis.index - root) % axis.size


def rank_of(place: int, axis, root: int) -> int:
    """The index on the axis of a place in the tree."""
    return (place + root) % axis.size


@watch.collective
def broadcast(x, axis, root: int = 0):
    """The root's x, on all ranks.  Elsewhere x says only the shape and dtype (`like` makes one).

    Messages: one to each child; elements T in each; time ceil(log2 p) (alpha + n beta).
    """
    place = place_of(axis, root, "broadcast")
    if place == 0:
        value = np.asarray(x, order="C")
    else:
        value = np.empty(x.shape, x.dtype)
        watch.held("received", value)
        axis.recv(value, rank_of(parent(place), axis, root))
    requests = [axis.isend(value, rank_of(child, axis, root)) for child in reversed(children(place, axis.size))]
    for request in requests:
        request.wait()
    return value


@watch.collective
@rounded_once
def reduce(x, axis, root: int = 0, op=np.add):
    """The sum of every rank's x, on the root; None elsewhere.  x of one shape on all ranks.

    Each rank adds up its children's sums, the nearest first, and sends the sum to its parent.
    Messages: one to the parent; elements T in it; time ceil(log2 p) (alpha + n beta + n gamma).
    """
    place = place_of(axis, root, "reduce")
    total = x
    arriving, sum_so_far = np.empty_like(total), np.empty_like(total)
    watch.held("received", [arriving, sum_so_far])
    for child in children(place, axis.size):
        axis.recv(arriving, rank_of(child, axis, root))
        total = op(total, arriving, out=sum_so_far)
    if place == 0:
        return total
    axis.send(total, rank_of(parent(place), axis, root))
    return None


def like(shape, dtype):
    """Something of this shape and dtype that takes one element of memory: for those who only receive."""
    return np.broadcast_to(np.zeros((), dtype), shape)
