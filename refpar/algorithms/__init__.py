"""The catalogue of collective algorithms: those of the core's table (`refpar/comm/choose.py`), and those that nobody gets unasked.

They are run by being given: `all_reduce(x, axis, algorithm=ALGORITHMS["all_reduce"]["chain"])`.  The core needs none of this room.
"""
from __future__ import annotations

from refpar.algorithms import bruck, halving, hierarchical, pairwise, pipelined, scattered, tree
from refpar.algorithms.pipelined import chain, two_trees
from refpar.comm import choose
from refpar.comm.choose import Algorithm, by_name

MORE = by_name({
    "all_reduce": [
        Algorithm("rabenseifner", lambda x, axis, task: halving.rabenseifner(x, axis, task.op)),
        Algorithm("hierarchical", lambda x, axis, task: hierarchical.all_reduce(x, axis, task.op)),
        Algorithm("tree", lambda x, axis, task: tree.all_reduce(x, axis, task.op)),
        Algorithm("chain", lambda x, axis, task: pipelined.all_reduce(x, axis, chain(task.p), task.segment, task.op)),
        Algorithm("double-tree", lambda x, axis, task: pipelined.all_reduce(x, axis, two_trees(task.p), task.segment, task.op))],
    "reduce_scatter": [Algorithm("halving", lambda flat, axis, parts, task: halving.reduce_scatter(flat, axis, parts, task.op))],
    "all_gather": [
        Algorithm("doubling", lambda flat, axis, parts, task: halving.all_gather(flat, axis, parts)),
        Algorithm("bruck", lambda flat, axis, parts, task: bruck.all_gather(flat, axis, parts))],
    "all_to_all": [
        Algorithm("pairwise", lambda blocks, axis, shapes, task: pairwise.exchange(blocks, axis, shapes)),
        Algorithm("bruck", lambda blocks, axis, shapes, task: bruck.all_to_all(blocks, axis, shapes, task.sizes))],
    "exchange": [Algorithm("pairwise", lambda blocks, axis, shapes, task: pairwise.exchange(blocks, axis, shapes))],
    "broadcast": [
        Algorithm("scattered", lambda x, axis, task: scattered.broadcast(x, axis, task.root)),
        Algorithm("chain", lambda x, axis, task: pipelined.broadcast(x, axis, task.root, chain(task.p), task.segment)),
        Algorithm("double-tree", lambda x, axis, task: pipelined.broadcast(x, axis, task.root, two_trees(task.p), task.segment))],
    "reduce": [
        Algorithm("rabenseifner", lambda x, axis, task: scattered.reduce(x, axis, task.root, task.op)),
        Algorithm("chain", lambda x, axis, task: pipelined.reduce(x, axis, task.root, chain(task.p), task.segment, task.op)),
        Algorithm("double-tree",
                  lambda x, axis, task: pipelined.reduce(x, axis, task.root, two_trees(task.p), task.segment, task.op))],
})
ALGORITHMS = {operation: known | MORE.get(operation, {}) for operation, known in choose.ALGORITHMS.items()}
