"""What every communication means: a reference of one process beside each, which knows nothing of messages.

A case has a name, the way to run it, what each rank is given, what the ranks must get (from the list of what all ranks of the
group gave), and the volume that the formulas promise.  "all_reduce" is what the table chooses, "all_reduce ring" one of it.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar import watch
from refpar.algorithms import ALGORITHMS, along
from refpar.algorithms.gather import gather, scatter
from refpar.comm import choose, collectives, pairs, ring
from refpar.comm.mesh import nodes
from refpar.config import shares
from refpar.oracle.situation_comm import CommSituation as S
from refpar.plan import promise, volume


class Case(NamedTuple):
    """run(x, axis, s) -> y.  given(s, index, *key) -> x.  meaning(xs, s) -> ys.  volume(index, s, ranks) -> Volume, in bytes.
    operation: the name under which its messages are booked."""
    operation: str
    run: Callable
    given: Callable
    meaning: Callable
    volume: Callable


# What a rank is given.

def _whole(s: S, index: int, *key):
    return s.numbers(s.shape, *key, index)


def _shard(s: S, index: int, *key):
    return s.numbers(s.shard_shape(s.dim, index), *key, index)


def _blocks(s: S, index: int, *key):
    """Blocks of unequal shapes: rank i has `sizes[i]` along dim, and the block for rank j `other_sizes[j]` along other."""
    x = _shard(s, index, *key)
    return [np.asarray(block) for block in np.split(x, np.cumsum(s.other_sizes)[:-1], axis=s.other)]


# What the ranks must get, from what all of them gave.

def _reduced(xs, s: S):
    return s.ufunc.reduce(xs, axis=0, dtype=xs[0].dtype)


def _cut(x, dim, sizes):
    return np.split(x, np.cumsum(sizes)[:-1], axis=dim)


def _on_root(value, s: S):
    return [value if index == s.root else None for index in range(s.size)]


def _all_to_all(xs, s: S):
    return _cut(np.concatenate(xs, axis=s.dim), s.other, s.other_sizes)


def _exchange(rows, s: S):
    return [list(column) for column in zip(*rows)]


def _moved(xs, s: S, step: int):
    return [xs[i - step] if 0 <= i - step < s.size else np.zeros_like(xs[i]) for i in range(s.size)]


# What they send.  Elements of each rank's part:

def _flat(s: S):
    return shares(int(np.prod(s.shape)), s.size)


def _along(s: S):
    return [int(np.prod(s.shard_shape(s.dim, index))) for index in range(s.size)]


def _same(s: S):
    return [int(np.prod(s.shape))] * s.size


def _block_sizes(s: S):
    rest = int(np.prod(s.shape)) // max(s.shape[s.dim] * s.shape[s.other], 1)
    return [[mine * theirs * rest for theirs in s.other_sizes] for mine in s.sizes]


def _promised(operation: str, name: str | None, sizes: Callable) -> Callable:
    """The volume of an algorithm of the table, for parts of `sizes(s)` elements."""
    def promised(i: int, s: S, ranks):
        root = s.root if operation in ("broadcast", "reduce") else 0
        task = choose.Task(sizes(s), np.dtype(s.dtype), nodes(ranks, s.node), root, s.segment)
        return promise.promised(operation, name, i, task)
    return promised


def _formula(elements: Callable) -> Callable:
    """elements(i, s) -> Volume, in bytes."""
    def promised(i: int, s: S, ranks):
        return elements(i, s).times(np.dtype(s.dtype).itemsize)
    return promised


def _arriving(axis, s: S) -> list[tuple]:
    """The shapes of the blocks that arrive by `exchange`."""
    shapes = []
    for size in s.sizes:
        shape = list(s.shape)
        shape[s.dim], shape[s.other] = size, s.other_sizes[axis.index]
        shapes.append(tuple(shape))
    return shapes


def _of_table(operation: str, name: str | None) -> Case:
    """One algorithm of an operation, or what the table chooses."""
    how = {} if name is None else {"algorithm": ALGORITHMS[operation][name]}
    given, run, meaning, sizes = {
        "all_reduce": (_whole, lambda x, axis, s: collectives.all_reduce(x, axis, s.ufunc, segment=s.segment, **how),
                       lambda xs, s: [_reduced(xs, s)] * s.size, _flat),
        "reduce_scatter": (_whole, lambda x, axis, s: collectives.reduce_scatter(x, axis, s.dim, s.sizes, s.ufunc, **how),
                           lambda xs, s: _cut(_reduced(xs, s), s.dim, s.sizes), _along),
        "all_gather": (_shard, lambda x, axis, s: collectives.all_gather(x, axis, s.dim, s.sizes, **how),
                       lambda xs, s: [np.concatenate(xs, axis=s.dim)] * s.size, _along),
        "all_to_all": (_shard, lambda x, axis, s: collectives.all_to_all(x, axis, s.other, s.other_sizes, s.dim, s.sizes, **how),
                       _all_to_all, _block_sizes),
        "exchange": (_blocks, lambda x, axis, s: collectives.exchange(x, axis, _arriving(axis, s), **how), _exchange, _block_sizes),
        "broadcast": (_whole, lambda x, axis, s: collectives.broadcast(x, axis, s.root, segment=s.segment, **how),
                      lambda xs, s: [xs[s.root]] * s.size, _flat),
        "reduce": (_whole, lambda x, axis, s: collectives.reduce(x, axis, s.root, s.ufunc, segment=s.segment, **how),
                   lambda xs, s: _on_root(_reduced(xs, s), s), _flat),
    }[operation]
    return Case(operation, run, given, meaning, _promised(operation, name, sizes))


def _ring(x, axis, s: S):
    """The ring of chapter 1, which its reader writes as f(x, axis)."""
    return ring.all_reduce(x, axis) if s.op == "add" else ring.all_reduce(x, axis, s.ufunc)


CASES: dict[str, Case] = {
    **{operation: _of_table(operation, None) for operation in ALGORITHMS},
    **{f"{operation} {name}": _of_table(operation, name) for operation, known in ALGORITHMS.items() for name in known},
    "gather": Case(
        "gather", lambda x, axis, s: gather(x, axis, s.dim, s.sizes, s.root), _shard,
        lambda xs, s: _on_root(np.concatenate(xs, axis=s.dim), s), _formula(lambda i, s: volume.gather(i, _along(s), s.root))),
    "scatter": Case(
        "scatter", lambda x, axis, s: scatter(x, axis, s.dim, s.sizes, s.root), _whole,
        lambda xs, s: _cut(xs[s.root], s.dim, s.sizes), _formula(lambda i, s: volume.scatter(i, _along(s), s.root))),
    "send_along": Case(
        "send_along", lambda x, axis, s: along.send_along(x, axis, 1), _whole,
        lambda xs, s: _moved(xs, s, 1), _formula(lambda i, s: volume.send_along(i, _same(s), 1))),
    "barrier": Case(
        "barrier", lambda x, axis, s: collectives.barrier(axis), _whole,
        lambda xs, s: [None] * s.size, _formula(lambda i, s: volume.barrier(i, _flat(s)))),
}
CASES["all_reduce ring"] = CASES["all_reduce ring"]._replace(run=_ring)


def cases_of(s: S, *operations: str) -> dict[str, Case]:
    """Those that a situation runs, of these operations or of any."""
    return {name: case for name, case in CASES.items()
            if name in (s.cases or CASES) and case.operation in (operations or (case.operation,))}


def sums_of(s: S) -> dict[str, Case]:
    """Those that add up: where the order of addends matters."""
    return cases_of(s, "all_reduce", "reduce_scatter", "reduce")


def optimal(operation: str, name: str, p: int) -> bool:
    """Whether an algorithm's ranks together send no byte more than must be sent."""
    always, halving = {"ring", "direct", "bruck"}, {"halving", "doubling", "rabenseifner"}
    if operation not in ("all_reduce", "reduce_scatter", "all_gather") or (operation, name) == ("all_reduce", "doubling"):
        return False
    return name in always or name in halving and p & (p - 1) == 0


# Every conjugate pair, and what compositions of them are.

PAIRS: dict[str, Callable] = {
    "copy_to": lambda axis, s: pairs.copy_to(axis),
    "reduce_from": lambda axis, s: pairs.reduce_from(axis),
    "over": lambda axis, s: pairs.over(axis),
    "gather_from": lambda axis, s: pairs.gather_from(axis, s.dim, s.sizes),
    "reduce_scatter_to": lambda axis, s: pairs.reduce_scatter_to(axis, s.dim, s.sizes),
    "scatter_to": lambda axis, s: pairs.scatter_to(axis, s.dim, s.sizes),
    "collect": lambda axis, s: pairs.collect(axis, s.dim, s.sizes),
    "swap": lambda axis, s: pairs.swap(axis, s.other, s.other_sizes, s.dim, s.sizes),
    "swap back": lambda axis, s: pairs.swap(axis, s.dim, s.sizes, s.other, s.other_sizes),
    "shift": lambda axis, s: along.shift(axis, s.dim),
}

# One pair after another is a third, or no change at all: in value and in gradient.
COMPOSITIONS: dict[tuple[str, str], str | None] = {
    ("scatter_to", "collect"): None,
    ("collect", "scatter_to"): None,
    ("swap", "swap back"): None,
    ("swap back", "swap"): None,
    ("scatter_to", "gather_from"): "copy_to",
    ("reduce_scatter_to", "gather_from"): "over",
    ("reduce_scatter_to", "collect"): "reduce_from",
    ("reduce_from", "copy_to"): "over",
    ("reduce_from", "scatter_to"): "reduce_scatter_to",
    ("collect", "copy_to"): "gather_from",
}


def ledger_volume(ledger: watch.Ledger, axis: str, operation: str) -> volume.Volume:
    """What a ledger counted on an axis for an operation, in bytes."""
    counters = [(counter, (way, axis, operation)) for way in ("send", "recv") for counter in (ledger.messages, ledger.bytes)]
    return volume.Volume(*(counter.get(key, 0) for counter, key in counters))
