"""What every communication means: a reference of one process beside each, which knows nothing of messages.

A case has a name, the way to run it, what each rank is given, what the ranks must get (from the list of what all ranks of the
group gave), and the volume that the formulas promise.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar import watch
from refpar.comm import collectives, pairs, trees, volume
from refpar.config import shares
from refpar.oracle.situation_comm import CommSituation as S


class Case(NamedTuple):
    """run(x, axis, s) -> y.  given(s, index, *key) -> x.  meaning(xs, s) -> ys.  volume(index, s) -> Volume."""
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

def _sum(xs):
    return np.sum(xs, axis=0, dtype=xs[0].dtype)


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


def _float16(name: str, s: S):
    return volume.FORMULAS[f"{name} float16" if s.dtype == "float16" else name]


def _block_sizes(s: S):
    rest = int(np.prod(s.shape)) // max(s.shape[s.dim] * s.shape[s.other], 1)
    return [[mine * theirs * rest for theirs in s.other_sizes] for mine in s.sizes]


def _run_exchange(x, axis, s: S):
    shapes = []
    for size in s.sizes:
        shape = list(s.shape)
        shape[s.dim], shape[s.other] = size, s.other_sizes[axis.index]
        shapes.append(tuple(shape))
    return collectives.exchange(x, axis, shapes)


CASES: dict[str, Case] = {
    "all_reduce": Case(
        lambda x, axis, s: collectives.all_reduce(x, axis), _whole,
        lambda xs, s: [_sum(xs)] * s.size, lambda i, s: _float16("all_reduce", s)(i, _flat(s))),
    "reduce_scatter": Case(
        lambda x, axis, s: collectives.reduce_scatter(x, axis, s.dim, s.sizes), _whole,
        lambda xs, s: _cut(_sum(xs), s.dim, s.sizes), lambda i, s: _float16("reduce_scatter", s)(i, _along(s))),
    "all_gather": Case(
        lambda x, axis, s: collectives.all_gather(x, axis, s.dim, s.sizes), _shard,
        lambda xs, s: [np.concatenate(xs, axis=s.dim)] * s.size, lambda i, s: volume.all_gather(i, _along(s))),
    "all_to_all": Case(
        lambda x, axis, s: collectives.all_to_all(x, axis, s.other, s.other_sizes, s.dim, s.sizes), _shard,
        _all_to_all, lambda i, s: volume.exchange(i, _block_sizes(s))),
    "exchange": Case(_run_exchange, _blocks, _exchange, lambda i, s: volume.exchange(i, _block_sizes(s))),
    "broadcast": Case(
        lambda x, axis, s: trees.broadcast(x, axis, s.root), _whole,
        lambda xs, s: [xs[s.root]] * s.size, lambda i, s: volume.broadcast(i, _flat(s), s.root)),
    "reduce": Case(
        lambda x, axis, s: trees.reduce(x, axis, s.root), _whole,
        lambda xs, s: _on_root(_sum(xs), s), lambda i, s: volume.reduce(i, _flat(s), s.root)),
    "gather": Case(
        lambda x, axis, s: trees.gather(x, axis, s.dim, s.sizes, s.root), _shard,
        lambda xs, s: _on_root(np.concatenate(xs, axis=s.dim), s), lambda i, s: volume.gather(i, _along(s), s.root)),
    "scatter": Case(
        lambda x, axis, s: trees.scatter(x, axis, s.dim, s.sizes, s.root), _whole,
        lambda xs, s: _cut(xs[s.root], s.dim, s.sizes), lambda i, s: volume.scatter(i, _along(s), s.root)),
    "send_along": Case(
        lambda x, axis, s: pairs.send_along(x, axis, 1), _whole,
        lambda xs, s: _moved(xs, s, 1), lambda i, s: volume.send_along(i, _same(s), 1)),
    "barrier": Case(
        lambda x, axis, s: collectives.barrier(axis), _whole,
        lambda xs, s: [None] * s.size, lambda i, s: volume.barrier(i, _flat(s))),
}


def itemsize(name: str, dtype: str) -> int:
    """Bytes of one element on its way."""
    return (trees.travels_as(dtype) if name == "reduce" else np.dtype(dtype)).itemsize


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
    "shift": lambda axis, s: pairs.shift(axis, s.dim),
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


def ledger_volume(ledger: watch.Ledger, axis: str, operation: str) -> dict[str, int]:
    """What a ledger counted on an axis for an operation, as the fields of a Volume, with bytes for elements."""
    def total(counter, way):
        return sum(n for key, n in counter.items() if key == (way, axis, operation))
    return {"messages": total(ledger.messages, "send"), "bytes": total(ledger.bytes, "send"),
            "messages_received": total(ledger.messages, "recv"), "bytes_received": total(ledger.bytes, "recv")}
