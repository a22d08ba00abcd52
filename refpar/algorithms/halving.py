"""Recursive halving, and doubling of parts: as few rounds as `refpar/comm/doubling.py`, and as few bytes as a ring.

**Halving** swaps only the half that the partner will keep, and so moves no more than a ring; doubling of parts runs it backwards.
**Rabenseifner's** all_reduce is halving and then doubling, as a ring's is two rings.  Partners, pairs and the order of sums are those
of recursive doubling, so all three sums are the same to the bit.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4.
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm.doubling import add_alike, among_leaders, fold, halvings, swap, with_partner
from refpar.comm.rounding import rounded_once
from refpar.comm.shards import slices
from refpar.config import shares


def doublings(place: int, ranks: int):
    """(partner, run that I have, run that it has) of each round: the same, backwards."""
    return reversed(list(halvings(place, ranks)))


@rounded_once
def rabenseifner(x, axis, op=np.add):
    """Halving, then doubling.  Messages 2 log2 p; elements 2(p-1)/p T, the lower bound where p is a power of 2;
    time 2 log2 p alpha + 2(p-1)/p n beta + (p-1)/p n gamma.  Between powers of 2, the pairs add as in `all_reduce`."""
    return among_leaders(x, axis, op, _halve_and_double)


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
    both = _halve(with_partner(flat, axis, partner, op), axis.among(leaders), _starts(parts, leaders), op)
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
        swap(axis, partner, given, arriving)
        total = room = add_alike(kept, arriving, axis, partner, op)
        first = keep[0]
    return total


def _double(flat, axis, starts):
    """In place: leader i has filled its run."""
    for partner, have, need in doublings(axis.index, axis.size):
        swap(axis, partner, flat[starts[have[0]]:starts[have[1]]], flat[starts[need[0]]:starts[need[1]]])
