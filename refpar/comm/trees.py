"""Binomial trees: broadcast, reduce, gather, scatter, from send and recv alone.

Idea: in each round every rank that has the value passes it on, so that those who have it double.  The root is place 0, the rank
`d` after it (around the axis) place d.  The parent of a place is that place without its lowest 1 bit, its children are the places
with one more bit below it:

    place   0          its children 1, 2, 4, ...         Under a place stand, in one run, the places up to the next one with the
            |- 1       place 6 = 110: parent 4 = 100      same parent: 4 holds 4 to 7.  Gather and scatter need just that: what a
            |- 2 - 3   its child 7 = 111                  place passes on is one run of memory.
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
from refpar.comm.shards import checked, from_front, slices, to_front


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


def end(place: int, p: int) -> int:
    """Under a place stand the places from itself to here, without this one."""
    lowest = place & -place if place else p
    return min(place + lowest, p)


def _place(axis, root: int, call: str) -> int:
    """How far this rank stands after the root."""
    if not 0 <= root < axis.size:
        raise ValueError(f"{call} on {axis.name}: root {root} must be an index from 0 to {axis.size - 1}")
    return (axis.index - root) % axis.size


def _rank(place: int, axis, root: int) -> int:
    """The index on the axis of a place in the tree."""
    return (place + root) % axis.size


@watch.collective
def broadcast(x, axis, root: int = 0):
    """The root's x, on all ranks.  Elsewhere x says only the shape and dtype (`like` makes one).

    Messages: one to each child; elements T in each; time ceil(log2 p) (alpha + n beta).
    """
    place = _place(axis, root, "broadcast")
    if place == 0:
        value = np.asarray(x, order="C")
    else:
        value = np.empty(x.shape, x.dtype)
        watch.held("received", value)
        axis.recv(value, _rank(parent(place), axis, root))
    requests = [axis.isend(value, _rank(child, axis, root)) for child in reversed(children(place, axis.size))]
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
    place = _place(axis, root, "reduce")
    total = x
    arriving, sum_so_far = np.empty_like(total), np.empty_like(total)
    watch.held("received", [arriving, sum_so_far])
    for child in children(place, axis.size):
        axis.recv(arriving, _rank(child, axis, root))
        total = op(total, arriving, out=sum_so_far)
    if place == 0:
        return total
    axis.send(total, _rank(parent(place), axis, root))
    return None


@rounded_once
def all_reduce(x, axis, op=np.add):
    """Up to rank 0 and down again.  Time 2 ceil(log2 p) (alpha + n beta) + ceil(log2 p) n gamma."""
    total = reduce(x, axis, 0, op)
    return broadcast(x if total is None else total, axis)


@watch.collective
def gather(x, axis, dim: int, sizes, root: int = 0):
    """Every rank's shard, side by side along `dim`, on the root; None elsewhere.

    x [.., sizes[i], ..] -> [.., sum(sizes), ..].  Messages: one to the parent; elements in it: the shards of all places under this
    one; time ceil(log2 p) alpha + (p-1)/p n beta.
    """
    dim, sizes = checked("gather", x, dim, sizes, axis, whole=False)
    place = _place(axis, root, "gather")
    front = to_front(x, dim)                                                            # [sizes[i], ...]
    parts = _parts(place, axis, root, sizes)
    under = np.empty((parts[-1].stop, *front.shape[1:]), x.dtype)
    watch.held("received", under)
    under[parts[0]] = front
    for child in children(place, axis.size):
        axis.recv(under[_run(child, place, axis.size, parts)], _rank(child, axis, root))
    if place == 0:
        return from_front(_turned(under, sum(sizes[:root])), dim)
    axis.send(under, _rank(parent(place), axis, root))
    return None


@watch.collective
def scatter(x, axis, dim: int = 0, sizes=None, root: int = 0):
    """Shard i along `dim` of the root's x, on rank i.  Elsewhere x says only the shape and dtype (`like` makes one).

    x [.., sum(sizes), ..] -> [.., sizes[i], ..].  The way of `gather`, downwards: messages, one to each child; elements in it: the
    shards of all places under that child; time ceil(log2 p) alpha + (p-1)/p n beta.
    """
    dim, sizes = checked("scatter", x, dim, sizes, axis, whole=True)
    place = _place(axis, root, "scatter")
    parts = _parts(place, axis, root, sizes)
    if place == 0:
        under = _turned(to_front(x, dim), -sum(sizes[:root]))
    else:
        under = np.empty((parts[-1].stop, *x.shape[:dim], *x.shape[dim + 1:]), x.dtype)
        watch.held("received", under)
        axis.recv(under, _rank(parent(place), axis, root))
    requests = [axis.isend(under[_run(child, place, axis.size, parts)], _rank(child, axis, root))
                for child in reversed(children(place, axis.size))]
    for request in requests:
        request.wait()
    return np.array(np.moveaxis(under[parts[0]], 0, dim), order="C")                    # a copy: it must not keep `under` alive


def like(shape, dtype):
    """Something of this shape and dtype that takes one element of memory: for those who only receive."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _parts(place, axis, root, sizes) -> list[slice]:
    """Where the shards of the places under this one lie in its room, one after another, its own first."""
    return slices([sizes[_rank(below, axis, root)] for below in range(place, end(place, axis.size))])


def _turned(front, places: int):
    """From the order of places to that of ranks, or back: the first dim turned around, where there is anything to turn."""
    return np.roll(front, places, axis=0) if places else front


def _run(child, place, p, parts) -> slice:
    """Where, in the room of `place`, the shards of all places under its child lie: one run."""
    return slice(parts[child - place].start, parts[end(child, p) - 1 - place].stop)
