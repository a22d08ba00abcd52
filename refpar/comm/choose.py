"""Which algorithm a collective runs: one table, by operation, bytes, ranks, nodes and dtype.

Every algorithm can be named (`all_reduce(x, axis, algorithm="ring")`).  Where none is, the first of the operation's list takes the
task whose condition holds.  All ranks of an axis must choose alike, so a condition looks only at what all of them know.

The bounds were measured (`refpar bench collectives`; on two cores): doubling to some 64 KiB, then halving or rings.  Where ranks
are no power of 2, halving pays for the ranks that are left over, and a ring does not.  What each algorithm sends is told in
`refpar/plan/promise.py`, what it should take in `refpar/plan/alpha_beta.py`.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar.comm import bruck, direct, doubling, hierarchical, pipelined, ring, scattered, trees
from refpar.comm.pipelined import chain, two_trees
from refpar.config import shares

SMALL = 1 << 16         # bytes: below, the number of messages counts, above, their length


class Task(NamedTuple):
    """What all ranks know of a task.  `sizes`: elements of each rank's part; of all_to_all, [i][j] of the block from i to j."""
    sizes: list
    dtype: np.dtype
    nodes: list[list[int]]
    root: int = 0
    segment: int | None = None  # bytes; None: as it is best
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
    """run(..., task) does it; `when(task)`: it is what the table chooses."""
    run: Callable
    when: Callable = never


ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    # run(x, axis, task) -> the sum
    "all_reduce": {
        "direct": Algorithm(lambda x, axis, task: direct.all_reduce(x, axis, task.op), float16),
        "hierarchical": Algorithm(lambda x, axis, task: hierarchical.all_reduce(x, axis, task.op), across_nodes),
        "doubling": Algorithm(lambda x, axis, task: doubling.all_reduce(x, axis, task.op), small),
        "rabenseifner": Algorithm(lambda x, axis, task: doubling.rabenseifner(x, axis, task.op), halves),
        "ring": Algorithm(lambda x, axis, task: ring.all_reduce(x, axis, task.op), always),
        "tree": Algorithm(lambda x, axis, task: trees.all_reduce(x, axis, task.op)),
        "chain": Algorithm(lambda x, axis, task: pipelined.all_reduce(x, axis, chain(task.p), task.segment, task.op)),
        "double-tree": Algorithm(lambda x, axis, task: pipelined.all_reduce(x, axis, two_trees(task.p), task.segment, task.op)),
    },
    # run(flat, axis, parts, task) -> my part of the sum
    "reduce_scatter": {
        "direct": Algorithm(lambda flat, axis, parts, task: direct.reduce_scatter(flat, axis, parts, task.op), float16),
        "halving": Algorithm(lambda flat, axis, parts, task: doubling.reduce_scatter(flat, axis, parts, task.op), halves),
        "ring": Algorithm(lambda flat, axis, parts, task: ring.reduce_scatter(flat, axis, parts, task.op), always),
    },
    # run(flat, axis, parts, task): fills the others' parts
    "all_gather": {
        "doubling": Algorithm(lambda flat, axis, parts, task: doubling.all_gather(flat, axis, parts), halves),
        "bruck": Algorithm(lambda flat, axis, parts, task: bruck.all_gather(flat, axis, parts), small),
        "ring": Algorithm(lambda flat, axis, parts, task: ring.all_gather(flat, axis, parts), always),
    },
    # run(blocks, axis, shapes, task) -> the blocks that arrive
    "all_to_all": {
        "direct": Algorithm(lambda blocks, axis, shapes, task: direct.exchange(blocks, axis, shapes), always),
        "pairwise": Algorithm(lambda blocks, axis, shapes, task: direct.pairwise(blocks, axis, shapes)),
        "bruck": Algorithm(lambda blocks, axis, shapes, task: bruck.all_to_all(blocks, axis, shapes, task.sizes)),
    },
    # the same, where no rank knows the blocks of others
    "exchange": {
        "direct": Algorithm(lambda blocks, axis, shapes, task: direct.exchange(blocks, axis, shapes), always),
        "pairwise": Algorithm(lambda blocks, axis, shapes, task: direct.pairwise(blocks, axis, shapes)),
    },
    # run(x, axis, task) -> the root's x
    "broadcast": {
        "scattered": Algorithm(lambda x, axis, task: scattered.broadcast(x, axis, task.root), scatters),
        "tree": Algorithm(lambda x, axis, task: trees.broadcast(x, axis, task.root), always),
        "chain": Algorithm(lambda x, axis, task: pipelined.broadcast(x, axis, task.root, chain(task.p), task.segment)),
        "double-tree": Algorithm(lambda x, axis, task: pipelined.broadcast(x, axis, task.root, two_trees(task.p), task.segment)),
    },
    # run(x, axis, task) -> the sum, on the root
    "reduce": {
        "rabenseifner": Algorithm(lambda x, axis, task: scattered.reduce(x, axis, task.root, task.op),
                                  lambda task: scatters(task) and halves(task)),
        "tree": Algorithm(lambda x, axis, task: trees.reduce(x, axis, task.root, task.op), always),
        "chain": Algorithm(lambda x, axis, task: pipelined.reduce(x, axis, task.root, chain(task.p), task.segment, task.op)),
        "double-tree": Algorithm(lambda x, axis, task: pipelined.reduce(x, axis, task.root, two_trees(task.p), task.segment, task.op)),
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
