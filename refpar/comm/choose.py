"""Which algorithm a collective runs: one table, by operation, bytes, ranks, nodes and dtype.

Every algorithm can be named (`all_reduce(x, axis, algorithm="ring")`).  Where none is, the first of the operation's list takes the
call whose condition holds.  All ranks of an axis must choose alike, so a condition looks only at what all of them know.

The bounds were measured (`refpar bench collectives`; on two cores): doubling to some 64 KiB, then halving or rings.  Where ranks
are no power of 2, halving pays for the ranks that are left over, and a ring does not.  Volumes are of rank i, in elements.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar.comm import bruck, direct, doubling, hierarchical, pipelined, ring, scattered, trees, volume
from refpar.comm.pipelined import SEGMENT, chain, elements, two_trees
from refpar.comm.rounding import travels_as
from refpar.config import shares

SMALL = 1 << 16         # bytes: below, the number of messages counts, above, their length


class Task(NamedTuple):
    """What all ranks know of a task.  `sizes`: elements of each rank's part; of all_to_all, [i][j] of the block from i to j."""
    sizes: list
    dtype: np.dtype
    nodes: list[list[int]]
    root: int = 0
    segment: int = SEGMENT      # bytes
    op: Callable = np.add

    @property
    def p(self) -> int:
        return len(self.sizes)

    @property
    def bytes(self) -> int:
        """Of the whole array."""
        return sum(sum(size) if isinstance(size, list) else size for size in self.sizes) * self.dtype.itemsize

    @property
    def power_of_two(self) -> bool:
        return self.p & (self.p - 1) == 0

    def in_segment(self, travels: Callable) -> int:
        """Elements of a segment of what travels as this dtype."""
        return elements(self.segment, travels(self.dtype))


def small(task: Task) -> bool:
    """Few bytes: the fewest messages win."""
    return task.bytes <= SMALL


def halves(task: Task) -> bool:
    """As few bytes as a ring sends, in fewer messages."""
    return task.power_of_two


def float16(task: Task) -> bool:
    """Sums would travel as float64; addends need not."""
    return task.dtype == np.float16


def across_nodes(task: Task) -> bool:
    """Some ranks are near and some are far, and there is enough to send."""
    return not small(task) and 1 < len(task.nodes) < task.p


def scatters(task: Task) -> bool:
    """A tree would send the whole array more than twice in a row."""
    return not small(task) and task.p >= 8


def always(task: Task) -> bool:
    """What is right where nothing else is."""
    return True


def never(task: Task) -> bool:
    """By name only."""
    return False


class Algorithm(NamedTuple):
    """run(..., task) does it; its arguments are those of the operation (`RUNS`).  volume(i, task): what rank i sends.
    travels: dtype -> dtype of what is sent, where that differs."""
    run: Callable
    volume: Callable
    when: Callable = never
    travels: Callable = np.dtype


def _sum(run, formula, when=never):
    return Algorithm(run, formula, when, travels_as)


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    # run(x, axis, task) -> the sum
    "all_reduce": {
        "direct": Algorithm(lambda x, axis, c: direct.all_reduce(x, axis, c.op),
                            lambda i, c: volume.all_reduce_direct(i, c.sizes), float16),
        "hierarchical": _sum(lambda x, axis, c: hierarchical.all_reduce(x, axis, c.op),
                             lambda i, c: volume.all_reduce_hierarchical(i, c.sizes, c.nodes), across_nodes),
        "doubling": _sum(lambda x, axis, c: doubling.all_reduce(x, axis, c.op),
                         lambda i, c: volume.all_reduce_doubling(i, c.sizes), small),
        "rabenseifner": _sum(lambda x, axis, c: doubling.rabenseifner(x, axis, c.op),
                             lambda i, c: volume.all_reduce_rabenseifner(i, c.sizes), halves),
        "ring": _sum(lambda x, axis, c: ring.all_reduce(x, axis, c.op), lambda i, c: volume.all_reduce(i, c.sizes), always),
        "tree": _sum(lambda x, axis, c: trees.all_reduce(x, axis, c.op), lambda i, c: volume.all_reduce_tree(i, c.sizes)),
        "chain": _sum(lambda x, axis, c: pipelined.all_reduce(x, axis, chain(c.p), c.segment, c.op),
                      lambda i, c: volume.all_reduce_pipelined(i, c.sizes, chain(c.p), c.in_segment(travels_as))),
        "double-tree": _sum(lambda x, axis, c: pipelined.all_reduce(x, axis, two_trees(c.p), c.segment, c.op),
                            lambda i, c: volume.all_reduce_pipelined(i, c.sizes, two_trees(c.p), c.in_segment(travels_as))),
    },
    # run(flat, axis, parts, task) -> my part of the sum
    "reduce_scatter": {
        "direct": Algorithm(lambda flat, axis, parts, c: direct.reduce_scatter(flat, axis, parts, c.op),
                            lambda i, c: volume.reduce_scatter_direct(i, c.sizes), float16),
        "halving": _sum(lambda flat, axis, parts, c: doubling.reduce_scatter(flat, axis, parts, c.op),
                        lambda i, c: volume.reduce_scatter_halving(i, c.sizes), halves),
        "ring": _sum(lambda flat, axis, parts, c: ring.reduce_scatter(flat, axis, parts, c.op),
                     lambda i, c: volume.reduce_scatter(i, c.sizes), always),
    },
    # run(flat, axis, parts, task): fills the others' parts
    "all_gather": {
        "doubling": Algorithm(lambda flat, axis, parts, c: doubling.all_gather(flat, axis, parts),
                              lambda i, c: volume.all_gather_doubling(i, c.sizes), halves),
        "bruck": Algorithm(lambda flat, axis, parts, c: bruck.all_gather(flat, axis, parts),
                           lambda i, c: volume.all_gather_bruck(i, c.sizes), small),
        "ring": Algorithm(lambda flat, axis, parts, c: ring.all_gather(flat, axis, parts),
                          lambda i, c: volume.all_gather(i, c.sizes), always),
    },
    # run(blocks, axis, shapes, task) -> the blocks that arrive
    "all_to_all": {
        "direct": Algorithm(lambda blocks, axis, shapes, c: direct.exchange(blocks, axis, shapes),
                            lambda i, c: volume.exchange(i, c.sizes), always),
        "pairwise": Algorithm(lambda blocks, axis, shapes, c: direct.pairwise(blocks, axis, shapes),
                              lambda i, c: volume.exchange(i, c.sizes)),
        "bruck": Algorithm(lambda blocks, axis, shapes, c: bruck.all_to_all(blocks, axis, shapes, c.sizes),
                           lambda i, c: volume.exchange_bruck(i, c.sizes)),
    },
    # the same, where no rank knows the blocks of others
    "exchange": {
        "direct": Algorithm(lambda blocks, axis, shapes, c: direct.exchange(blocks, axis, shapes),
                            lambda i, c: volume.exchange(i, c.sizes), always),
        "pairwise": Algorithm(lambda blocks, axis, shapes, c: direct.pairwise(blocks, axis, shapes),
                              lambda i, c: volume.exchange(i, c.sizes)),
    },
    # run(x, axis, task) -> the root's x
    "broadcast": {
        "scattered": Algorithm(lambda x, axis, c: scattered.broadcast(x, axis, c.root),
                               lambda i, c: volume.broadcast_scattered(i, c.sizes, c.root), scatters),
        "tree": Algorithm(lambda x, axis, c: trees.broadcast(x, axis, c.root),
                          lambda i, c: volume.broadcast(i, c.sizes, c.root), always),
        "chain": Algorithm(lambda x, axis, c: pipelined.broadcast(x, axis, c.root, chain(c.p), c.segment),
                           lambda i, c: volume.broadcast_pipelined(i, c.sizes, c.root, chain(c.p), c.in_segment(np.dtype))),
        "double-tree": Algorithm(lambda x, axis, c: pipelined.broadcast(x, axis, c.root, two_trees(c.p), c.segment),
                                 lambda i, c: volume.broadcast_pipelined(i, c.sizes, c.root, two_trees(c.p),
                                                                         c.in_segment(np.dtype))),
    },
    # run(x, axis, task) -> the sum, on the root
    "reduce": {
        "rabenseifner": _sum(lambda x, axis, c: scattered.reduce(x, axis, c.root, c.op),
                             lambda i, c: volume.reduce_rabenseifner(i, c.sizes, c.root),
                             lambda c: scatters(c) and halves(c)),
        "tree": _sum(lambda x, axis, c: trees.reduce(x, axis, c.root, c.op),
                     lambda i, c: volume.reduce(i, c.sizes, c.root), always),
        "chain": _sum(lambda x, axis, c: pipelined.reduce(x, axis, c.root, chain(c.p), c.segment, c.op),
                      lambda i, c: volume.reduce_pipelined(i, c.sizes, c.root, chain(c.p), c.in_segment(travels_as))),
        "double-tree": _sum(lambda x, axis, c: pipelined.reduce(x, axis, c.root, two_trees(c.p), c.segment, c.op),
                            lambda i, c: volume.reduce_pipelined(i, c.sizes, c.root, two_trees(c.p), c.in_segment(travels_as))),
    },
}


def chosen(operation: str, name: str | None, task: Task) -> str:
    """The name of the algorithm that runs; ValueError, one sentence, where there is none of that name."""
    known = ALGORITHMS[operation]
    if name is None:
        return next(one for one, algorithm in known.items() if algorithm.when(task))
    if name not in known:
        raise ValueError(f"{operation}: there is no algorithm {name!r}; there are {', '.join(known)}")
    return name


def algorithm(operation: str, name: str | None, task: Task) -> Algorithm:
    """The algorithm that runs."""
    return ALGORITHMS[operation][chosen(operation, name, task)]


def task_of(x, axis, sizes=None, **options) -> Task:
    """What all ranks of the axis know of a call on x; sizes by default as even as can be."""
    return Task(shares(x.size, axis.size) if sizes is None else sizes, x.dtype, axis.nodes(), **options)


def all_reduce_sends(i: int, count: int, p: int, dtype) -> volume.Volume:
    """Messages and BYTES of rank i of p, for an all_reduce of so many elements, on one node."""
    return promised("all_reduce", None, i, Task(shares(count, p), np.dtype(dtype), [list(range(p))]))


def promised(operation: str, name: str | None, i: int, task: Task) -> volume.Volume:
    """Messages and BYTES of rank i."""
    one = algorithm(operation, name, task)
    size = one.travels(task.dtype).itemsize
    messages, sent, received, arriving = one.volume(i, task)
    return volume.Volume(messages, sent * size, received, arriving * size)
