"""What each algorithm should take: the alpha-beta-gamma model, for p ranks and an array of n bytes.

A message of m bytes takes alpha + m beta (latency, and one over the bandwidth), adding m bytes m gamma; every rank sends one
message and receives another at the same time, and all links are alike.  So an algorithm's time is a sum of three terms, of which
the model needs only the factors:

    time = messages * alpha + passes * n * beta + sums * n * gamma         along the longest chain of steps

Parts are even, p is a power of 2 but for rings and chains, and k are the segments of a pipeline (of two trees, of both together).
For all_to_all n is the bytes of the blocks on each rank, else those of the whole array.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005); for two trees
Sanders, Speck and Träff (2009).  A test holds these beside virtual time (`refpar/clock.py`).
"""
from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """The factors of alpha, n beta and n gamma."""
    messages: float
    passes: float
    sums: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other)))

    def seconds(self, n: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """alpha in seconds, beta and gamma in seconds a byte."""
        return self.messages * alpha + (self.passes * beta + self.sums * gamma) * n


def cost(operation: str, algorithm: str, p: int, segments: int = 1) -> Cost:
    """The factors of an algorithm of the table; segments: k of a pipeline, for all of the array."""
    lg, rest, k = (p - 1).bit_length(), (p - 1) / p, segments
    chain = (p - 2 + k) if p > 1 else 0                                                  # steps of one segment each
    around, halving = Cost(p - 1, rest), Cost(lg, rest)
    up_tree = Cost(lg, lg, lg)
    two = (2 * (lg - 1) + k) if p > 1 else 0
    costs = {
        "all_reduce": {
            "ring": around._replace(sums=rest) + around, "direct": around._replace(sums=rest) + around,
            "tree": up_tree + Cost(lg, lg), "doubling": up_tree, "rabenseifner": halving._replace(sums=rest) + halving,
            "chain": Cost(2 * chain, 2 * chain / k, chain / k), "double-tree": Cost(2 * two, 2 * two / k, two / k)},
        "reduce_scatter": {name: way._replace(sums=rest) for name, way in
                           (("ring", around), ("direct", around), ("halving", halving))},
        "all_gather": {"ring": around, "doubling": halving, "bruck": halving},
        "all_to_all": {"direct": around, "pairwise": around, "bruck": Cost(lg, lg / 2)},
        "broadcast": {"tree": Cost(lg, lg), "scattered": Cost(lg, rest) + around,
                      "chain": Cost(chain, chain / k), "double-tree": Cost(two, two / k)},
        "reduce": {"tree": up_tree, "rabenseifner": halving._replace(sums=rest) + Cost(lg, rest),
                   "chain": Cost(chain, chain / k, chain / k), "double-tree": Cost(two, two / k, two / k)},
    }
    return costs[operation][algorithm]


def hierarchical(node: int, nodes: int) -> tuple[Cost, Cost]:
    """all_reduce of `nodes` nodes with `node` ranks each: the factors inside a node, and those across, of other alpha and beta."""
    across = cost("all_reduce", "ring", nodes)
    return cost("all_reduce", "ring", node), across._replace(passes=across.passes / node, sums=across.sums / node)


def crossover(short: Cost, long: Cost, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Bytes above which `long`, of more messages and fewer bytes, is faster than `short`.

    For all_reduce by a tree and around a ring, and gamma 0: alpha/beta (p-1-log2 p)/(log2 p - (p-1)/p), for p a power of 2.
    """
    saved = (short.passes - long.passes) * beta + (short.sums - long.sums) * gamma
    return (long.messages - short.messages) * alpha / saved


def best_segments(n: float, steps: int, alpha: float, beta: float) -> float:
    """The k that makes (steps + k)(alpha + n/k beta) least: sqrt(steps n beta / alpha).  A chain has p-2 steps beside the k."""
    return (steps * n * beta / alpha) ** 0.5
