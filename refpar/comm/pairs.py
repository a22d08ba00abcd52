"""Conjugate pairs: every communication with its transpose, and the placements it leads from and to.

A pair's forward is a linear map A from a value that lies as `takes` to one that lies as `gives`.  Its backward is the transpose A',
from the gradient of the second to the gradient of the first, which lie as the gradient table says (`refpar/comm/placement.py`).
Proved by <dy, A x> = <A' dy, x>, exactly, on whole numbers.

    pair                forward                             backward
    copy_to             Invariant -> Replicate  nothing     Partial -> Invariant    all_reduce
    reduce_from         Partial -> Invariant    all_reduce  Invariant -> Replicate  nothing
    over                Partial -> Replicate    all_reduce  Partial -> Replicate    all_reduce
    gather_from         Shard -> Replicate      all_gather  Partial -> Shard        reduce_scatter
    reduce_scatter_to   Partial -> Shard   reduce_scatter   Shard -> Replicate      all_gather
    scatter_to          Invariant -> Shard      a slice     Shard -> Invariant      all_gather
    collect             Shard -> Invariant      all_gather  Invariant -> Shard      a slice
    swap                Shard -> Shard          all_to_all  Shard -> Shard          all_to_all, back

A side that sends nothing is written down like any other: what people forget is the other side, which does.
Source: Shoeybi et al., "Megatron-LM" (2019), section 3, for the first two (f and g); Korthikanti et al., "Reducing activation
recomputation in large transformer models" (2022), for gather_from and reduce_scatter_to.
"""
from __future__ import annotations

from functools import partial
from typing import Callable, NamedTuple


from refpar.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from refpar.comm.placement import Invariant, Partial, Placement, Replicate, Shard
from refpar.comm.shards import checked, part_of, slices


class Pair(NamedTuple):
    """forward: x that lies as `takes` -> y that lies as `gives`.  backward: dy -> dx, its transpose."""
    forward: Callable
    backward: Callable
    takes: Placement
    gives: Placement


def keep(x):
    """Nothing is sent: on the ranks both placements look alike."""
    return x


def my_slice(x, axis, dim: int, sizes=None):
    """This rank's shard of what all ranks hold: nothing is sent.  A copy, so that the whole can be freed."""
    dim, sizes = checked("my_slice", x, dim, sizes, axis, whole=True)
    return part_of(x, dim, slices(sizes)[axis.index]).copy()


def copy_to(axis) -> Pair:
    """Before ranks go separate ways with a value that all have: their gradients are addends."""
    return Pair(keep, partial(all_reduce, axis=axis), Invariant, Replicate)


def reduce_from(axis) -> Pair:
    """Where they meet again: the sum of what each made, and one gradient for all."""
    return Pair(partial(all_reduce, axis=axis), keep, Partial, Invariant)


def over(axis) -> Pair:
    """Completes a sum on the way: what follows is again each rank's own."""
    return Pair(partial(all_reduce, axis=axis), partial(all_reduce, axis=axis), Partial, Replicate)


def gather_from(axis, dim: int, sizes) -> Pair:
    """The whole from its shards, for ranks that then go separate ways."""
    return Pair(partial(all_gather, axis=axis, dim=dim, sizes=sizes), partial(reduce_scatter, axis=axis, dim=dim, sizes=sizes),
                Shard(dim), Replicate)


def reduce_scatter_to(axis, dim: int, sizes) -> Pair:
    """Of the sum of what each made, every rank keeps a shard."""
    return Pair(partial(reduce_scatter, axis=axis, dim=dim, sizes=sizes), partial(all_gather, axis=axis, dim=dim, sizes=sizes),
                Partial, Shard(dim))


def scatter_to(axis, dim: int, sizes) -> Pair:
    """Of what all have, every rank keeps a shard."""
    return Pair(partial(my_slice, axis=axis, dim=dim, sizes=sizes), partial(all_gather, axis=axis, dim=dim, sizes=sizes),
                Invariant, Shard(dim))


def collect(axis, dim: int, sizes) -> Pair:
    """The whole from its shards, for ranks that all do the same with it: so each needs only its slice of the one gradient."""
    return Pair(partial(all_gather, axis=axis, dim=dim, sizes=sizes), partial(my_slice, axis=axis, dim=dim, sizes=sizes),
                Shard(dim), Invariant)


def swap(axis, split: int, split_sizes, join: int, join_sizes) -> Pair:
    """Cut along `join` before, along `split` after."""
    there = partial(all_to_all, axis=axis, split=split, split_sizes=split_sizes, join=join, join_sizes=join_sizes)
    back = partial(all_to_all, axis=axis, split=join, split_sizes=join_sizes, join=split, join_sizes=split_sizes)
    return Pair(there, back, Shard(join), Shard(split))
