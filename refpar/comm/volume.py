"""What each collective sends: formulas for one rank, exact for any sizes, beside the survey's table 2.

`sizes` holds the elements of every rank's part of an array of T = sum(sizes) elements; p is their number, and `i` the rank, by
index on the axis.  Every formula answers with a Volume: messages and elements that rank i sends, and that it receives.  Bytes are
elements times the itemsize (of float64 where `reduce` adds up float16).  A test holds these against the ledger of real runs.

Messages are counted as sent: a ring of p ranks sends p-1 messages even where parts are empty.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

from refpar.comm.trees import children, end


class Volume(NamedTuple):
    """What one rank sends and receives."""
    messages: int
    elements: int
    messages_received: int
    elements_received: int

    def __add__(self, other: Volume) -> Volume:
        return Volume(*(a + b for a, b in zip(self, other)))


NOTHING = Volume(0, 0, 0, 0)


def reduce_scatter(i: int, sizes) -> Volume:
    """Sent: a sum of every part but the own.  Received: every part but the left neighbour's own, which it finishes."""
    p, total = len(sizes), sum(sizes)
    return Volume(p - 1, total - sizes[i], p - 1, total - sizes[(i - 1) % p])


def reduce_scatter_float16(i: int, sizes) -> Volume:
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


def all_reduce_float16(i: int, sizes) -> Volume:
    """Both, with the exchange in place of the ring."""
    return reduce_scatter_float16(i, sizes) + all_gather(i, sizes)


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
    "send_along": send_along, "all_reduce float16": all_reduce_float16, "reduce_scatter float16": reduce_scatter_float16,
}


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
