"""Recursive halving and doubling: partners at distances 1, 2, 4, ... rather than neighbours.

Idea: after k rounds in which everybody swaps with a partner whose number differs in one bit, 2**k ranks know of each other: log2 p
rounds where a ring takes p-1.  **Doubling** swaps all that is known.  **Halving** swaps only the half that the partner will keep,
and so moves no more than a ring.  **Rabenseifner's** all_reduce is halving and then doubling, as a ring's is two rings.

The numbers of partners differ in one bit, so this needs 2**k ranks.  Of p = 2**k + r the first 2r stand in pairs, (0 1), (2 3),
...: the second of a pair gives what it has to the first, rests, and is given the result.

    p = 6:  (0 1) (2 3) 4 5     leaders 0 2 4 5     rounds of the leaders, as 0 1 2 3:  distance 2: 0-2 1-3    distance 1: 0-1 2-3

A partner's sum is always added as op(lower, higher), so both get the same bits; all three sums here add in the same order, so their
results are the same to the bit.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.rounding import rounded_once
from refpar.comm.shards import slices
from refpar.config import shares


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


def doublings(place: int, ranks: int):
    """(partner, run that I have, run that it has) of each round: the same, backwards."""
    return reversed(list(halvings(place, ranks)))


@rounded_once
def all_reduce(x, axis, op=np.add):
    """Each round swaps the whole sum so far.  Messages log2 p; elements log2 p T; time log2 p (alpha + n beta + n gamma).

    Between powers of 2, the pairs add 2 (alpha + n beta) + n gamma, and log2 p is rounded down.
    """
    return _among_leaders(x, axis, op, _swap_sums)


@rounded_once
def rabenseifner(x, axis, op=np.add):
    """Halving, then doubling.  Messages 2 log2 p; elements 2(p-1)/p T, the lower bound where p is a power of 2;
    time 2 log2 p alpha + 2(p-1)/p n beta + (p-1)/p n gamma.  Between powers of 2, the pairs add as in `all_reduce`."""
    return _among_leaders(x, axis, op, _halve_and_double)


def _among_leaders(x, axis, op, work):
    """work(x, leaders, op) on 2**k ranks, where the first of each pair has added the second's x, which is given the result."""
    leaders, partner = fold(axis.index, axis.size)
    if axis.index not in leaders:
        axis.send(x, partner)
        total = np.empty_like(x)
        watch.held("received", total)
        axis.recv(total, partner)
        return total
    total = work(_with_partner(x, axis, partner, op), axis.among(leaders), op)
    if partner is not None:
        axis.send(total, partner)
    return total


def _with_partner(x, axis, partner, op):
    """My x and that of the rank that stands behind me, if any does."""
    if partner is None:
        return x
    arriving = np.empty_like(x)
    axis.recv(arriving, partner)
    return op(x, arriving, out=arriving)


def _swap(axis, partner: int, send, receive):
    """One round."""
    coming = axis.irecv(receive, partner)
    going = axis.isend(send, partner)
    coming.wait()
    going.wait()


def _add(mine, theirs, axis, partner: int, op):
    """Both partners add alike: the lower one's sum stands first.  The result stands where theirs arrived."""
    return op(mine, theirs, out=theirs) if axis.index < partner else op(theirs, mine, out=theirs)


def _swap_sums(total, axis, op):
    scratch = [np.empty_like(total) for _ in range(2)]                                  # one is sent while the other is filled
    watch.held("received", scratch)
    for number, (partner, _, _) in enumerate(halvings(axis.index, axis.size)):
        arriving = scratch[number % 2]
        _swap(axis, partner, total, arriving)
        total = _add(total, arriving, axis, partner, op)
    return total


def _halve_and_double(x, axis, op):
    parts = slices(shares(x.size, axis.size))
    total = np.empty(x.size, x.dtype)
    total[parts[axis.index]] = _halve(x.reshape(x.size), axis, _starts(parts, range(axis.size)), op)
    _double(total, axis, _starts(parts, range(axis.size)))
    return total.reshape(x.shape)


@rounded_once
def reduce_scatter(flat, axis, parts, op=np.add):
    """Part i of the sum, on rank i, by halving.  Messages log2 p; elements (p-1)/p T where p is a power of 2; time log2 p alpha +
    (p-1)/p n (beta + gamma).  Between powers of 2, the pairs add (alpha + n beta + n gamma) + (alpha + n/p beta).
    """
    leaders, partner = fold(axis.index, axis.size)
    mine = parts[axis.index]
    length = mine.stop - mine.start
    if axis.index not in leaders:
        axis.send(flat, partner)
        part = np.empty(length, flat.dtype)
        axis.recv(part, partner)
        return part
    both = _halve(_with_partner(flat, axis, partner, op), axis.among(leaders), _starts(parts, leaders), op)
    if partner is not None:
        axis.send(both[length:], partner)
    return both[:length]


def all_gather(flat, axis, parts):
    """In place, by doubling: rank i has filled part i of `flat`.  Messages log2 p; elements (p-1)/p T where p is a power of 2;
    time log2 p alpha + (p-1)/p n beta.  Between powers of 2, the pairs add (alpha + n/p beta) + (alpha + n beta)."""
    watch.held("received", flat)
    leaders, partner = fold(axis.index, axis.size)
    if axis.index not in leaders:
        axis.send(flat[parts[axis.index]], partner)
        axis.recv(flat, partner)
        return
    if partner is not None:
        axis.recv(flat[parts[partner]], partner)
    _double(flat, axis.among(leaders), _starts(parts, leaders))
    if partner is not None:
        axis.send(flat, partner)


def _starts(parts, leaders) -> list[int]:
    """Where the run of each leader begins (its part, and that of the rank behind it), and where the last one ends."""
    return [*(parts[leader].start for leader in leaders), parts[-1].stop]


def _halve(flat, axis, starts, op):
    """The run of leader i of the sum of every leader's flat."""
    total, room, first = flat, None, 0                                                  # `total` begins at leader `first`
    for partner, keep, give in halvings(axis.index, axis.size):
        kept, given = (total[starts[a] - starts[first]:starts[b] - starts[first]] for a, b in (keep, give))
        arriving = np.empty_like(kept)
        watch.held("received", [room, arriving])
        _swap(axis, partner, given, arriving)
        total = room = _add(kept, arriving, axis, partner, op)
        first = keep[0]
    return total


def _double(flat, axis, starts):
    """In place: leader i has filled its run."""
    for partner, have, need in doublings(axis.index, axis.size):
        _swap(axis, partner, flat[starts[have[0]]:starts[have[1]]], flat[starts[need[0]]:starts[need[1]]])
