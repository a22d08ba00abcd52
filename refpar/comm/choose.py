"""Which algorithm a collective runs: one table, by operation, bytes, ranks, nodes and dtype.

Every algorithm can be named (`all_reduce(x, axis, algorithm="ring")`).  Where none is, the first of the operation's list takes the
task whose condition holds.  All ranks of an axis must choose alike, so a condition looks only at what all of them know.  An
algorithm that is not here is given as an object: `refpar/algorithms` has trees of pipelines, hierarchies and others.

The bound was measured (`refpar bench collectives`; on two cores): doubling to some 64 KiB, then rings.  What each algorithm sends is
told in `refpar/plan/promise.py`, what it should take in `refpar/plan/alpha_beta.py`.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar.comm import direct, doubling, ring, trees
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


def small(task: Task) -> bool:
    """Few bytes: the fewest messages win."""
    return task.bytes <= SMALL


def float16(task: Task) -> bool:
    """Sums would travel as float64; addends need not."""
    return task.dtype == np.float16


def always(task: Task) -> bool:
    """What is right where nothing else is."""
    return True


def never(task: Task) -> bool:
    """By name only."""
    return False


class Algorithm(NamedTuple):
    """run(..., task) does it; `when(task)`: it is what the table chooses."""
    name: str
    run: Callable
    when: Callable = never


def by_name(operations: dict[str, list[Algorithm]]) -> dict[str, dict[str, Algorithm]]:
    """A table: operation -> name -> algorithm, in the order given."""
    return {operation: {one.name: one for one in known} for operation, known in operations.items()}


ALGORITHMS = by_name({
    # run(x, axis, task) -> the sum
    "all_reduce": [
        Algorithm("direct", lambda x, axis, task: direct.all_reduce(x, axis, task.op), float16),
        Algorithm("doubling", lambda x, axis, task: doubling.all_reduce(x, axis, task.op), small),
        Algorithm("ring", lambda x, axis, task: ring.all_reduce(x, axis, task.op), always)],
    # run(flat, axis, parts, task) -> my part of the sum
    "reduce_scatter": [
        Algorithm("direct", lambda flat, axis, parts, task: direct.reduce_scatter(flat, axis, parts, task.op), float16),
        Algorithm("ring", lambda flat, axis, parts, task: ring.reduce_scatter(flat, axis, parts, task.op), always)],
    # run(flat, axis, parts, task): fills the others' parts
    "all_gather": [Algorithm("ring", lambda flat, axis, parts, task: ring.all_gather(flat, axis, parts), always)],
    # run(blocks, axis, shapes, task) -> the blocks that arrive
    "all_to_all": [Algorithm("direct", lambda blocks, axis, shapes, task: direct.exchange(blocks, axis, shapes), always)],
    # the same, where no rank knows the blocks of others
    "exchange": [Algorithm("direct", lambda blocks, axis, shapes, task: direct.exchange(blocks, axis, shapes), always)],
    # run(x, axis, task) -> the root's x
    "broadcast": [Algorithm("tree", lambda x, axis, task: trees.broadcast(x, axis, task.root), always)],
    # run(x, axis, task) -> the sum, on the root
    "reduce": [Algorithm("tree", lambda x, axis, task: trees.reduce(x, axis, task.root, task.op), always)],
})


def algorithm(operation: str, how: str | Algorithm | None, task: Task) -> Algorithm:
    """The algorithm that runs: the one given, that of a name, or the first whose condition holds.  ValueError, one sentence, where
    there is none of that name."""
    known = ALGORITHMS[operation]
    if isinstance(how, Algorithm):
        return how
    if how is None:
        return next(one for one in known.values() if one.when(task))
    if how not in known:
        raise ValueError(f"{operation}: there is no algorithm {how!r}; there are {', '.join(known)}, and any Algorithm itself")
    return known[how]


def task_of(x, axis, sizes=None, **options) -> Task:
    """What all ranks of the axis know of a call on x; sizes by default as even as can be."""
    return Task(shares(x.size, axis.size) if sizes is None else sizes, x.dtype, axis.nodes(), **options)
