"""What each algorithm of the catalogue (`refpar/algorithms`) sends: its formula, in bytes, for one rank.

A formula gets the rank's index and the Task, which is what all ranks know of a call, and answers in elements; `promised` makes bytes of
them.  A test holds these against the ledger of real runs, for every algorithm, any number of ranks, even and uneven sizes.
"""
from __future__ import annotations

from typing import Callable

import numpy as np

from refpar.algorithms.pipelined import chain, elements, two_trees
from refpar.comm.choose import Task, algorithm
from refpar.comm.rounding import travels_as
from refpar.config import shares
from refpar.plan import volume
from refpar.plan.volume import Volume

SUMS = ("all_reduce", "reduce_scatter", "reduce")


def travels(operation: str, name: str, dtype) -> np.dtype:
    """The dtype of what an algorithm sends: that of sums, where sums travel."""
    return travels_as(dtype) if operation in SUMS and name != "direct" else np.dtype(dtype)


def _piped(formula: Callable, trees: Callable, travels: Callable) -> Callable:
    def of(i: int, task: Task) -> Volume:
        return formula(i, task.sizes, task.root, trees(task.p), elements(task.segment, travels(task.dtype)))
    return of


def _plain(formula: Callable) -> Callable:
    return lambda i, task: formula(i, task.sizes)


def _rooted(formula: Callable) -> Callable:
    return lambda i, task: formula(i, task.sizes, task.root)


FORMULAS: dict[str, dict[str, Callable[[int, Task], Volume]]] = {
    "all_reduce": {
        "direct": _plain(volume.all_reduce_direct), "doubling": _plain(volume.all_reduce_doubling),
        "rabenseifner": _plain(volume.all_reduce_rabenseifner), "ring": _plain(volume.all_reduce),
        "tree": _plain(volume.all_reduce_tree), "chain": _piped(volume.all_reduce_pipelined, chain, travels_as),
        "double-tree": _piped(volume.all_reduce_pipelined, two_trees, travels_as),
        "hierarchical": lambda i, task: volume.all_reduce_hierarchical(i, task.sizes, task.nodes)},
    "reduce_scatter": {"direct": _plain(volume.reduce_scatter_direct), "halving": _plain(volume.reduce_scatter_halving),
                       "ring": _plain(volume.reduce_scatter)},
    "all_gather": {"doubling": _plain(volume.all_gather_doubling), "bruck": _plain(volume.all_gather_bruck),
                   "ring": _plain(volume.all_gather)},
    "all_to_all": {"direct": _plain(volume.exchange), "pairwise": _plain(volume.exchange), "bruck": _plain(volume.exchange_bruck)},
    "exchange": {"direct": _plain(volume.exchange), "pairwise": _plain(volume.exchange)},
    "broadcast": {"scattered": _rooted(volume.broadcast_scattered), "tree": _rooted(volume.broadcast),
                  "chain": _piped(volume.broadcast_pipelined, chain, np.dtype),
                  "double-tree": _piped(volume.broadcast_pipelined, two_trees, np.dtype)},
    "reduce": {"rabenseifner": _rooted(volume.reduce_rabenseifner), "tree": _rooted(volume.reduce),
               "chain": _piped(volume.reduce_pipelined, chain, travels_as),
               "double-tree": _piped(volume.reduce_pipelined, two_trees, travels_as)},
}


def promised(operation: str, name: str | None, i: int, task: Task) -> Volume:
    """Messages and BYTES of rank i; name None: of what the core's table chooses."""
    name = name or algorithm(operation, None, task).name
    return FORMULAS[operation][name](i, task).times(travels(operation, name, task.dtype).itemsize)


def all_reduce_sends(i: int, count: int, p: int, dtype) -> Volume:
    """Messages and BYTES of rank i of p, for an all_reduce of so many elements, on one node."""
    return promised("all_reduce", None, i, Task(shares(count, p), np.dtype(dtype), [list(range(p))]))
