"""Recursive doubling: partners at distances 1, 2, 4, ... rather than neighbours.

Idea: after k rounds in which everybody swaps all that it knows with a partner whose number differs in one bit, 2**k ranks know of each
other: log2 p rounds where a ring takes p-1.  The way of short arrays.  (`refpar/algorithms/halving.py` swaps half as much each round.)

The numbers of partners differ in one bit, so this needs 2**k ranks.  Of p = 2**k + r the first 2r stand in pairs, (0 1), (2 3),
...: the second of a pair gives what it has to the first, rests, and is given the result.

    p = 6:  (0 1) (2 3) 4 5     leaders 0 2 4 5     rounds of the leaders, as 0 1 2 3:  distance 2: 0-2 1-3    distance 1: 0-1 2-3

A partner's sum is always added as op(lower, higher), so both get the same bits.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.rounding import rounded_once


class Fold(NamedTuple):
    """p ranks as 2**k.  leaders: their indices.  partner: the other of this rank's pair, if it stands in one."""
    leaders: list[int]
    partner: int | None


def fold(index: int, p: int) -> Fold:
    """The fold of p ranks, as rank `index` sees it."""
    pairs = p - (1 << (p.bit_length() - 1))
    leaders = [*range(0, 2 * pairs, 2), *range(2 * pairs, p)]
    return Fold(leaders, index ^ 1 if index < 2 * pairs else None)


def halvings(place: int, ranks: int):
    """(partner, half that I keep, half that I give) of each round, far partners first; halves as (first, end) of the leaders."""
    low, high = 0, ranks
    while high - low > 1:
        middle = (low + high) // 2
        halves = [(low, middle), (middle, high)]
        keep, give = halves if place < middle else reversed(halves)
        yield place ^ (middle - low), keep, give
        low, high = keep


@rounded_once
def all_reduce(x, axis, op=np.add):
    """Each round swaps the whole sum so far.  Messages log2 p; elements log2 p T; time log2 p (alpha + n beta + n gamma).

    Between powers of 2, the pairs add 2 (alpha + n beta) + n gamma, and log2 p is rounded down.
    """
    return among_leaders(x, axis, op, _swap_sums)


def among_leaders(x, axis, op, work):
    """work(x, leaders, op) on 2**k ranks, where the first of each pair has added the second's x, which is given the result."""
    leaders, partner = fold(axis.index, axis.size)
    if axis.index not in leaders:
        axis.send(x, partner)
        total = np.empty_like(x)
        watch.held("received", total)
        axis.recv(total, partner)
        return total
    total = work(with_partner(x, axis, partner, op), axis.among(leaders), op)
    if partner is not None:
        axis.send(total, partner)
    return total


def with_partner(x, axis, partner, op):
    """My x and that of the rank that stands behind me, if any does."""
    if partner is None:
        return x
    arriving = np.empty_like(x)
    axis.recv(arriving, partner)
    return op(x, arriving, out=arriving)


def swap(axis, partner: int, send, receive):
    """One round."""
    coming = axis.irecv(receive, partner)
    going = axis.isend(send, partner)
    coming.wait()
    going.wait()


def add_alike(mine, theirs, axis, partner: int, op):
    """Both partners add alike: the lower one's sum stands first.  The result stands where theirs arrived."""
    return op(mine, theirs, out=theirs) if axis.index < partner else op(theirs, mine, out=theirs)


def _swap_sums(total, axis, op):
    scratch = [np.empty_like(total) for _ in range(2)]                                  # one is sent while the other is filled
    watch.held("received", scratch)
    for number, (partner, _, _) in enumerate(halvings(axis.index, axis.size)):
        arriving = scratch[number % 2]
        swap(axis, partner, total, arriving)
        total = add_alike(total, arriving, axis, partner, op)
    return total
