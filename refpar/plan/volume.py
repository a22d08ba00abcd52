"""What each collective sends: formulas for one rank, exact for any sizes, beside the survey's table 2.

First the rings, trees and direct messages of FORMULAS, then every other algorithm (`refpar/plan/promise.py` has the table).  `sizes`
holds the elements of every rank's part of an array of T = sum(sizes) elements; p is their number, and `i` the rank, by index on
the axis.  Every formula answers with a Volume: messages and elements that rank i sends, and that it receives.  Bytes are elements
times the itemsize (of float64 where sums of float16 travel, `refpar/comm/rounding.py`).  A test holds these against the ledger of
real runs.

Messages are counted as sent: a ring of p ranks sends p-1 messages even where parts are empty.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

from refpar.algorithms import bruck, pipelined
from refpar.algorithms.gather import end
from refpar.algorithms.hierarchical import share_lengths, width
from refpar.algorithms.halving import doublings
from refpar.comm.doubling import fold, halvings
from refpar.comm.trees import children
from refpar.config import shares


class Volume(NamedTuple):
    """What one rank sends and receives."""
    messages: int
    elements: int
    messages_received: int
    elements_received: int

    def __add__(self, other: Volume) -> Volume:
        return Volume(*(a + b for a, b in zip(self, other)))

    def times(self, itemsize: int) -> Volume:
        """The same, with bytes for elements."""
        return Volume(self.messages, self.elements * itemsize, self.messages_received, self.elements_received * itemsize)


NOTHING = Volume(0, 0, 0, 0)


def reduce_scatter(i: int, sizes) -> Volume:
    """Sent: a sum of every part but the own.  Received: every part but the left neighbour's own, which it finishes."""
    p, total = len(sizes), sum(sizes)
    return Volume(p - 1, total - sizes[i], p - 1, total - sizes[(i - 1) % p])


def reduce_scatter_direct(i: int, sizes) -> Volume:
    """Sent: the same.  Received: p-1 addends of the own part."""
    p, total = len(sizes), sum(sizes)
    return Volume(p - 1, total - sizes[i], p - 1, (p - 1) * sizes[i])


def all_gather(i: int, sizes) -> Volume:
    """Sent: every part but the right neighbour's own.  Received: every part but the own."""
    p, total = len(sizes), sum(sizes)
    return Volume(p - 1, total - sizes[(i + 1) % p], p - 1, total - sizes[i])


def all_reduce(i: int, sizes) -> Volume:
    """Both, on the flattened array."""
    return reduce_scatter(i, sizes) + all_gather(i, sizes)


def all_reduce_direct(i: int, sizes) -> Volume:
    """Both, with the direct messages in place of the first ring."""
    return reduce_scatter_direct(i, sizes) + all_gather(i, sizes)


def exchange(i: int, blocks) -> Volume:
    """blocks[i][j]: elements from rank i to rank j.  The own block does not travel."""
    p = len(blocks)
    return Volume(p - 1, sum(blocks[i]) - blocks[i][i], p - 1, sum(row[i] for row in blocks) - blocks[i][i])


def all_to_all(i: int, split_sizes, join_sizes, rest: int = 1) -> Volume:
    """Sizes as all_to_all has them, and the elements at each place of (split, join)."""
    return exchange(i, [[split * join * rest for split in split_sizes] for join in join_sizes])


def broadcast(i: int, sizes, root: int = 0) -> Volume:
    """The whole, to each child, after it came from the parent."""
    p, total = len(sizes), sum(sizes)
    place = (i - root) % p
    below, above = len(children(place, p)), int(place > 0)
    return Volume(below, below * total, above, above * total)


def reduce(i: int, sizes, root: int = 0) -> Volume:
    """The way of broadcast, upwards."""
    return _reversed(broadcast(i, sizes, root))


def scatter(i: int, sizes, root: int = 0) -> Volume:
    """The parts of all places under a child, to that child."""
    p = len(sizes)
    place = (i - root) % p
    below = [_under(child, sizes, root) for child in children(place, p)]
    above = int(place > 0)
    return Volume(len(below), sum(below), above, above * _under(place, sizes, root))


def gather(i: int, sizes, root: int = 0) -> Volume:
    """The way of scatter, upwards."""
    return _reversed(scatter(i, sizes, root))


def barrier(i: int, sizes) -> Volume:
    """ceil(log2 p) empty messages."""
    rounds = (len(sizes) - 1).bit_length()
    return Volume(rounds, 0, rounds, 0)


def send_along(i: int, sizes, step: int = 1) -> Volume:
    """One message, but for the rank at the end; `sizes` are all the same here."""
    p = len(sizes)
    sends, receives = int(0 <= i + step < p), int(0 <= i - step < p)
    return Volume(sends, sends * sizes[i], receives, receives * sizes[i])


def _under(place: int, sizes, root: int) -> int:
    """Elements of the parts of all places under one."""
    p = len(sizes)
    return sum(sizes[(below + root) % p] for below in range(place, end(place, p)))


def _reversed(volume: Volume) -> Volume:
    return Volume(volume.messages_received, volume.elements_received, volume.messages, volume.elements)


FORMULAS: dict[str, Callable[..., Volume]] = {
    "all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather, "exchange": exchange,
    "all_to_all": all_to_all, "broadcast": broadcast, "reduce": reduce, "scatter": scatter, "gather": gather, "barrier": barrier,
    "send_along": send_along,
}


# Halving and doubling.

def both_ways(messages: int, elements: int) -> Volume:
    """As much is received as sent."""
    return Volume(messages, elements, messages, elements)


def all_reduce_doubling(i: int, sizes) -> Volume:
    """A leader swaps the whole in each round; a pair swaps it once more."""
    leaders, partner = fold(i, len(sizes))
    rounds = _rounds(len(leaders)) if i in leaders else 0
    return both_ways(rounds, rounds * sum(sizes)) + _of_pair(partner, sum(sizes))


def all_reduce_rabenseifner(i: int, sizes) -> Volume:
    """A leader halves and doubles; a pair swaps the whole once more."""
    leaders, partner = fold(i, len(sizes))
    volume, total = NOTHING, sum(sizes)
    if i in leaders:
        place, parts = leaders.index(i), shares(total, len(leaders))
        volume = reduce_scatter_halving(place, parts) + all_gather_doubling(place, parts)
    return volume + _of_pair(partner, total)


def reduce_scatter_halving(i: int, sizes) -> Volume:
    """In each round: the half that I give, for that which I keep.  A pair: the whole, for the part of its second."""
    leaders, partner = fold(i, len(sizes))
    if i not in leaders:
        return Volume(1, sum(sizes), 1, sizes[i])
    volume, runs = NOTHING, _runs(leaders, sizes)
    for _, keep, give in halvings(leaders.index(i), len(leaders)):
        volume += Volume(1, sum(runs[slice(*give)]), 1, sum(runs[slice(*keep)]))
    return volume + (NOTHING if partner is None else Volume(1, sizes[partner], 1, sum(sizes)))


def all_gather_doubling(i: int, sizes) -> Volume:
    """In each round: what I have, for what I need.  A pair: the part of its second, for the whole."""
    leaders, partner = fold(i, len(sizes))
    if i not in leaders:
        return Volume(1, sizes[i], 1, sum(sizes))
    volume, runs = NOTHING, _runs(leaders, sizes)
    for _, have, need in doublings(leaders.index(i), len(leaders)):
        volume += Volume(1, sum(runs[slice(*have)]), 1, sum(runs[slice(*need)]))
    return volume + (NOTHING if partner is None else Volume(1, sum(sizes), 1, sizes[partner]))


def reduce_rabenseifner(i: int, sizes, root: int = 0) -> Volume:
    """Halving, and a tree to the root."""
    return reduce_scatter_halving(i, sizes) + gather(i, sizes, root)


def _rounds(leaders: int) -> int:
    return leaders.bit_length() - 1


def _of_pair(partner, total: int) -> Volume:
    """x one way and the result the other."""
    return NOTHING if partner is None else both_ways(1, total)


def _runs(leaders: list[int], sizes) -> list[int]:
    """Elements of each leader's part and that of the rank behind it."""
    return [sum(sizes[leader:end]) for leader, end in zip(leaders, [*leaders[1:], len(sizes)])]


# Bruck, pipelines, nodes.

def all_gather_bruck(i: int, sizes) -> Volume:
    """Round k: the parts of as many ranks from me on as I have or as are missing, for those that follow."""
    p, volume = len(sizes), NOTHING
    for reach in bruck.rounds(p):
        count = min(reach, p - reach)
        volume += Volume(1, sum(sizes[(i + step) % p] for step in range(count)),
                         1, sum(sizes[(i + reach + step) % p] for step in range(count)))
    return volume


def exchange_bruck(i: int, blocks) -> Volume:
    """blocks[i][j]: elements from rank i to rank j.  Round k: every block that has bit k in its way."""
    p, volume = len(blocks), NOTHING
    for reach in bruck.rounds(p):
        here, there = (sum(bruck.arriving_size(rank, steps, reach, blocks) for steps in range(p) if steps & reach)
                       for rank in (i, (i + reach) % p))
        volume += Volume(1, there, 1, here)
    return volume


def broadcast_scattered(i: int, sizes, root: int = 0) -> Volume:
    """The parts down a tree, and around a ring."""
    return scatter(i, sizes, root) + all_gather(i, sizes)


def broadcast_pipelined(i: int, sizes, root: int, trees, segment: int) -> Volume:
    """Every segment, to each child in its tree, after it came from the parent; `segment` in elements."""
    place, volume = (i - root) % len(sizes), NOTHING
    for tree, piece in pipelined.segments(sum(sizes), len(trees), segment):
        below, above, length = len(pipelined.children(trees[tree], place)), int(place > 0), piece.stop - piece.start
        volume += Volume(below, below * length, above, above * length)
    return volume


def reduce_pipelined(i: int, sizes, root: int, trees, segment: int) -> Volume:
    """The way of broadcast, upwards."""
    return _reversed(broadcast_pipelined(i, sizes, root, trees, segment))


def all_reduce_pipelined(i: int, sizes, root: int, trees, segment: int) -> Volume:
    """Up and down."""
    return reduce_pipelined(i, sizes, root, trees, segment) + broadcast_pipelined(i, sizes, root, trees, segment)


def all_reduce_tree(i: int, sizes) -> Volume:
    """Up and down."""
    return reduce(i, sizes) + broadcast(i, sizes)


def all_reduce_hierarchical(i: int, sizes, nodes) -> Volume:
    """Two rings inside the node, and those across it, of my share, where I have one."""
    node = next(node for node in nodes if i in node)
    place, lengths = node.index(i), share_lengths(sum(sizes), nodes, node)
    volume = reduce_scatter(place, lengths) + all_gather(place, lengths)
    if place < width(nodes):
        volume += all_reduce(nodes.index(node), shares(lengths[place], len(nodes)))
    return volume


class Row(NamedTuple):
    """One line of the survey's table 2 (section 3.1), data moved per device, for N devices and T elements of the WHOLE array.

    `printed` is the survey's own formula, `ours` refpar's for even parts, `note` the difference, `counts` what both count;
    `value(N, T)` computes ours.
    """
    printed: str
    ours: str
    note: str
    counts: str
    value: Callable[[int, int], float]


SURVEY: dict[str, Row] = {
    "reduce": Row("(N-1) T", "ceil(log2 N) T", "the survey's root hears from each rank, ours from its children in a tree",
                  "received by the root", lambda n, t: (n - 1).bit_length() * t),
    "gather": Row("(N-1) T", "(N-1)/N T", "the survey's T is one rank's part", "received by the root",
                  lambda n, t: (n - 1) * t / n),
    "all_gather": Row("(N-1) T/N", "(N-1)/N T", "the survey says that its T is the size before the operation, one rank's part; the "
                      "formula holds for the whole", "sent by each", lambda n, t: (n - 1) * t / n),
    "reduce_scatter": Row("(N-1) T/N", "(N-1)/N T", "none", "sent by each", lambda n, t: (n - 1) * t / n),
    "all_to_all": Row("(N-1) T/N", "(N-1)/N**2 T", "the survey's T is one rank's part", "sent by each",
                      lambda n, t: (n - 1) * t / n**2),
    "all_reduce": Row("2 (N-1) T/N", "2 (N-1)/N T", "none", "sent by each", lambda n, t: 2 * (n - 1) * t / n),
}


def lower_bound(operation: str, sizes) -> int:
    """Elements that all ranks together must send, whatever the algorithm.

    A sum of p addends that lie on p ranks takes p-1 messages for each element, and to tell the others takes p-1 more.
    """
    passes = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2}[operation]
    return passes * (len(sizes) - 1) * sum(sizes)
