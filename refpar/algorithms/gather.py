"""Gather and scatter along the binomial tree of `refpar/comm/trees.py`: shards to one rank, and back.

Idea: under a place of the tree stand, in one run, the places up to the next one with the same parent.  So what a place passes on,
the shards of all places under it, is one run of memory, and the whole takes ceil(log2 p) rounds.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4.1.
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm.shards import checked, from_front, slices, to_front
from refpar.comm.trees import children, parent, place_of, rank_of


@watch.collective
def gather(x, axis, dim: int, sizes, root: int = 0):
    """Every rank's shard, side by side along `dim`, on the root; None elsewhere.

    x [.., sizes[i], ..] -> [.., sum(sizes), ..].  Messages: one to the parent; elements in it: the shards of all places under this
    one; time ceil(log2 p) alpha + (p-1)/p n beta.
    """
    dim, sizes = checked("gather", x, dim, sizes, axis, whole=False)
    place = place_of(axis, root, "gather")
    front = to_front(x, dim)                                                            # [sizes[i], ...]
    parts = _parts(place, axis, root, sizes)
    under = np.empty((parts[-1].stop, *front.shape[1:]), x.dtype)
    watch.held("received", under)
    under[parts[0]] = front
    for child in children(place, axis.size):
        axis.recv(under[_run(child, place, axis.size, parts)], rank_of(child, axis, root))
    if place == 0:
        return from_front(_turned(under, sum(sizes[:root])), dim)
    axis.send(under, rank_of(parent(place), axis, root))
    return None


@watch.collective
def scatter(x, axis, dim: int = 0, sizes=None, root: int = 0):
    """Shard i along `dim` of the root's x, on rank i.  Elsewhere x says only the shape and dtype (`trees.like` makes one).

    x [.., sum(sizes), ..] -> [.., sizes[i], ..].  The way of `gather`, downwards: messages, one to each child; elements in it: the
    shards of all places under that child; time ceil(log2 p) alpha + (p-1)/p n beta.
    """
    dim, sizes = checked("scatter", x, dim, sizes, axis, whole=True)
    place = place_of(axis, root, "scatter")
    parts = _parts(place, axis, root, sizes)
    if place == 0:
        under = _turned(to_front(x, dim), -sum(sizes[:root]))
    else:
        under = np.empty((parts[-1].stop, *x.shape[:dim], *x.shape[dim + 1:]), x.dtype)
        watch.held("received", under)
        axis.recv(under, rank_of(parent(place), axis, root))
    requests = [axis.isend(under[_run(child, place, axis.size, parts)], rank_of(child, axis, root))
                for child in reversed(children(place, axis.size))]
    for request in requests:
        request.wait()
    return np.array(np.moveaxis(under[parts[0]], 0, dim), order="C")                    # a copy: it must not keep `under` alive


def end(place: int, p: int) -> int:
    """Under a place stand the places from itself to here, without this one."""
    lowest = place & -place if place else p
    return min(place + lowest, p)


def _parts(place, axis, root, sizes) -> list[slice]:
    """Where the shards of the places under this one lie in its room, one after another, its own first."""
    return slices([sizes[rank_of(below, axis, root)] for below in range(place, end(place, axis.size))])


def _turned(front, places: int):
    """From the order of places to that of ranks, or back: the first dim turned around, where there is anything to turn."""
    return np.roll(front, places, axis=0) if places else front


def _run(child, place, p, parts) -> slice:
    """Where, in the room of `place`, the shards of all places under its child lie: one run."""
    return slice(parts[child - place].start, parts[end(child, p) - 1 - place].stop)
