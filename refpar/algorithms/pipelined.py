"""Long arrays in segments, along a chain or two binary trees: while one segment is passed on, the next arrives.

Idea: a binomial tree sends the whole array log2 p times, one after the other.  In a **chain** each rank passes it on once, and as
it does so segment by segment, all ranks are busy at once; but a chain is p-1 ranks long.  A **binary tree** is only log2 p high,
but its leaves, half of the ranks, send nothing, and the others everything twice.  So **two trees** each carry half of the array,
and are laid such that no rank has children in both.

          0               The first tree of p = 8.  Place 0 is the root of both trees, and stands aside.  The others stand in order:
          4               what is under a place on its left is smaller, and what is on its right is larger.  So leaves are odd.
        2   6             The second tree is the first in a mirror (p odd) or turned by one place (p even): its leaves are even.
       1 3 5 7

A tree is written as its parents: parents[place], None for place 0; the root stands at place 0, and the others follow around the
axis.  A rank never waits for one tree where another rank waits for it in the other: what it passes on comes before what it keeps,
and what it has itself leaves some rounds ahead of what it must wait for.

Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009); NCCL's double
trees.
"""
from __future__ import annotations

from itertools import chain as chained
from itertools import zip_longest

import numpy as np

from refpar import watch
from refpar.comm.rounding import rounded_once
from refpar.comm.shards import slices
from refpar.config import shares

SEGMENT = 1 << 18       # bytes


def chain(p: int) -> list[list]:
    """One tree: each place under the one before."""
    return [[None, *range(p - 1)]]


def two_trees(p: int) -> list[list]:
    """Two, for half of the array each."""
    last = p - 1
    first = [None, *(above(place, last) for place in range(1, p))]

    def plays(place):
        return p - place if last % 2 == 0 else (place - 2) % last + 1

    def played_by(place):
        return p - place if last % 2 == 0 else place % last + 1
    uppers = [first[plays(place)] for place in range(1, p)]
    return [first, [None, *(played_by(upper) if upper else 0 for upper in uppers)]]


def above(place: int, last: int) -> int:
    """The parent of a place among 1 to `last`, in order: 4 over 2 and 6, 2 over 1 and 3.  0 over the uppermost."""
    lowest = place & -place
    beside = place - lowest
    parent = beside | 2 * lowest
    return parent if parent <= last else beside


def segments(count: int, trees: int, length: int) -> list[tuple[int, slice]]:
    """(tree, slice) of every segment, the trees in turn: `count` elements, shared by the trees, `length` at a time."""
    cut = [[(tree, slice(start, min(start + length, part.stop)))
            for start in range(part.start, max(part.stop, part.start + 1), length)]
           for tree, part in enumerate(slices(shares(count, trees)))]
    return [piece for piece in chained(*zip_longest(*cut)) if piece is not None]


def broadcast(x, axis, root: int, trees: list[list], segment: int | None):
    """The root's x, on all ranks.  Elsewhere x says only the shape and dtype.  segment: bytes.

    k segments, each in a message to every child.  Time of a chain (p-2+k)(alpha + n/k beta), of two trees
    (2 log2 p - 2 + k)(alpha + n/k beta): with many segments, n beta, and a tree would need log2 p times as long.
    """
    place = (axis.index - root) % axis.size
    value = np.asarray(x, order="C") if place == 0 else np.empty(x.shape, x.dtype)
    _down(value.reshape(value.size), axis, root, trees, segment)
    return value


@rounded_once
def reduce(x, axis, root: int, trees: list[list], segment: int | None, op=np.add):
    """The sum of every rank's x, on the root; None elsewhere.  The way of broadcast, upwards, with an addition for each message."""
    total = np.array(x, order="C")
    _up(total.reshape(total.size), axis, root, trees, segment, op)
    return total if axis.index == root else None


@rounded_once
def all_reduce(x, axis, trees: list[list], segment: int | None, op=np.add):
    """Up to rank 0, and down again, by the same trees."""
    total = np.array(x, order="C")
    _up(total.reshape(total.size), axis, 0, trees, segment, op)
    _down(total.reshape(total.size), axis, 0, trees, segment)
    return total


def _down(flat, axis, root, trees, segment):
    place, rank = (axis.index - root) % axis.size, [(place + root) % axis.size for place in range(axis.size)]
    pieces, below = segments(flat.size, len(trees), elements(segment, flat.dtype)), [children(tree, place) for tree in trees]
    watch.held("received", [flat] if place else [])
    coming = [axis.irecv(flat[piece], rank[trees[tree][place]]) if place else None for tree, piece in pieces]
    going = []
    for (tree, piece), arriving in sorted(zip(pieces, coming), key=lambda job: not below[job[0][0]]):   # first what others wait for
        if arriving:
            arriving.wait()
        going += [axis.isend(flat[piece], rank[child]) for child in below[tree]]
    for request in going:
        request.wait()


def _up(flat, axis, root, trees, segment, op):
    place, rank = (axis.index - root) % axis.size, [(place + root) % axis.size for place in range(axis.size)]
    pieces, below = segments(flat.size, len(trees), elements(segment, flat.dtype)), [children(tree, place) for tree in trees]
    scratch = np.empty(max(piece.stop - piece.start for _, piece in pieces), flat.dtype)
    watch.held("received", scratch)
    ahead = axis.size.bit_length()                                                      # rounds: what waits for nobody leaves first
    turns = sorted(enumerate(pieces), key=lambda turn: turn[0] // len(trees) + ahead * bool(below[turn[1][0]]))
    going = []
    for _, (tree, piece) in turns:
        mine = flat[piece]
        for child in below[tree]:
            arriving = scratch[:mine.size]
            axis.recv(arriving, rank[child])
            op(mine, arriving, out=mine)
        if place:
            going.append(axis.isend(mine, rank[trees[tree][place]]))
    for request in going:
        request.wait()


def children(parents: list, place: int) -> list[int]:
    """The places under one."""
    return [child for child, parent in enumerate(parents) if parent == place]


def elements(segment: int | None, dtype) -> int:
    """Elements of a segment of so many bytes, None: SEGMENT; at least one."""
    return max((segment or SEGMENT) // np.dtype(dtype).itemsize, 1)
