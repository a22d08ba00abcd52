"""Ring collectives, all_to_all and barrier, from send and recv alone.

Notation: p ranks on the axis, T elements of the whole array, n its bytes; a message takes alpha + beta * bytes, an addition gamma
a byte.  Every message of the formulas is sent, an empty one too, so that uneven and empty shards need no case of their own.
Formulas for one rank, exact for uneven sizes, stand in `refpar/comm/volume.py`.

Arguments are never written, and what is returned may be the argument or a view of it: nobody writes to either.  The order of
summation depends on p and the sizes alone, so a run repeats itself bitwise, and all ranks get the same bits.

Sources: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009); Thakur, Rabenseifner and
Gropp, "Optimization of collective communication operations in MPICH" (2005), for the times.
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm.shards import checked, from_front, part_of, row_of, slices, to_front
from refpar.config import shares


@watch.collective
def all_reduce(x, axis):
    """The sum of every rank's x, on all ranks: Partial -> Replicate or Invariant.  x of one shape on all ranks.

    Idea: nobody needs the whole sum before it is finished, so each rank finishes 1/p of it (reduce_scatter of the flattened array),
    and then all pass the finished parts on (all_gather).
    Messages 2(p-1); elements 2(p-1)/p T, the lower bound; time 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma.
    """
    x = np.asarray(x, order="C")
    flat = x.reshape(x.size)
    parts = slices(shares(x.size, axis.size))
    total = np.empty_like(flat)
    _sum_of_parts(flat, parts, axis, out=total[parts[axis.index]])
    _pass_around(total, parts, axis)
    return total.reshape(x.shape)


@watch.collective
def reduce_scatter(x, axis, dim: int = 0, sizes=None):
    """The sum of every rank's x, of which rank i keeps shard i along `dim`: Partial -> Shard(dim).

    x [.., sum(sizes), ..] -> [.., sizes[i], ..].  Messages p-1; elements (p-1)/p T, the lower bound;
    time (p-1) alpha + (p-1)/p n (beta + gamma).
    """
    dim, sizes = checked("reduce_scatter", x, dim, sizes, axis, whole=True)
    front = to_front(x, dim)                                                            # [sum(sizes), ...]
    row = row_of(front)
    mine = np.empty((sizes[axis.index], *front.shape[1:]), x.dtype)
    _sum_of_parts(front.reshape(front.size), slices([size * row for size in sizes]), axis, out=mine.reshape(mine.size))
    return from_front(mine, dim)


@watch.collective
def all_gather(x, axis, dim: int, sizes):
    """Every rank's shard, side by side along `dim`, on all ranks: Shard(dim) -> Replicate or Invariant.

    x [.., sizes[i], ..] -> [.., sum(sizes), ..].  Messages p-1; elements (p-1)/p T, the lower bound;
    time (p-1) alpha + (p-1)/p n beta.
    """
    dim, sizes = checked("all_gather", x, dim, sizes, axis, whole=False)
    front = to_front(x, dim)                                                            # [sizes[i], ...]
    row = row_of(front)
    whole = np.empty((sum(sizes), *front.shape[1:]), x.dtype)
    flat, parts = whole.reshape(whole.size), slices([size * row for size in sizes])
    flat[parts[axis.index]] = front.reshape(front.size)
    _pass_around(flat, parts, axis)
    return from_front(whole, dim)


def _sum_of_parts(flat, parts, axis, out):
    """`out` becomes part i of the sum of every rank's `flat`.  Both ways send the same messages and bytes."""
    if flat.dtype == np.float16:
        _sum_directly(flat, parts, axis, out)
    else:
        _sum_around(flat, parts, axis, out)


def _sum_around(flat, parts, axis, out):
    """Ring reduce-scatter: a sum of each part travels once around the ring and ends, complete, on the rank that keeps it.

    Part i sets out on rank i+1, and each rank on its way adds its own addend.  In each of the p-1 steps every rank sends one sum to
    the right and receives another from the left.
    """
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    longest = max(part.stop - part.start for part in parts)
    scratch = [np.empty(longest, flat.dtype) for _ in range(2)]                         # one is sent while the other is filled
    watch.held("received", scratch)
    travelling = flat[parts[left]]
    for step in range(axis.size - 1):
        mine = flat[parts[(axis.index - 2 - step) % axis.size]]
        arriving = scratch[step % 2][:mine.size]
        coming = axis.irecv(arriving, left)
        going = axis.isend(travelling, right)
        coming.wait()
        going.wait()
        travelling = np.add(arriving, mine, out=arriving)
    out[...] = travelling


def _sum_directly(flat, parts, axis, out):
    """Reduce-scatter by exchange, for float16: every rank sends its addend of part j straight to rank j, which rounds once.

    A ring would round to 11 bits at each hop, and the error grow with the ranks.  Here p-1 messages and (p-1)/p T elements travel
    as in the ring, still as float16; their sum in float64 is exact for up to 2**13 ranks, and one rounding remains.
    """
    addends = _swap([flat[part] for part in parts], [out.shape] * axis.size, axis)
    out[...] = np.sum(addends, axis=0, dtype=np.float64)


def _pass_around(flat, parts, axis):
    """Ring all-gather, in place: rank i has filled part i of `flat`; in p-1 steps each part travels around the ring.

    Every rank sends on, in each step, what it received in the step before.
    """
    watch.held("received", [flat])
    right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    for step in range(axis.size - 1):
        coming = axis.irecv(flat[parts[(axis.index - 1 - step) % axis.size]], left)
        going = axis.isend(flat[parts[(axis.index - step) % axis.size]], right)
        coming.wait()
        going.wait()


@watch.collective
def exchange(blocks, axis, shapes):
    """Block j of every rank goes to rank j: blocks of any shapes, and `shapes` are those that will arrive, one for each rank.

    Returns the arrived blocks in the order of the ranks (this rank's own among them, as it was given).  Pairwise: in step s rank i
    sends to i+s and receives from i-s, so that no rank is asked by two at once; all steps are posted together.
    Messages p-1; elements all but the own block; time (p-1) alpha + (p-1)/p n beta, for n bytes of blocks on each rank.
    """
    if len(blocks) != axis.size or len(shapes) != axis.size:
        raise ValueError(f"exchange on {axis.name}: {len(blocks)} blocks and {len(shapes)} shapes must be {axis.size}, one a rank")
    if tuple(shapes[axis.index]) != blocks[axis.index].shape:
        raise ValueError(f"exchange on {axis.name}: rank {axis.index} keeps a block of shape {list(blocks[axis.index].shape)}, and "
                         f"shapes make it {list(shapes[axis.index])}")
    return _swap(blocks, shapes, axis)


def _swap(blocks, shapes, axis) -> list:
    """The messages of `exchange`."""
    mine = blocks[axis.index]
    arrived = [mine if source == axis.index else np.empty(shape, mine.dtype) for source, shape in enumerate(shapes)]
    watch.held("received", arrived[:axis.index] + arrived[axis.index + 1:])
    requests = []
    for step in range(1, axis.size):
        source = (axis.index - step) % axis.size
        requests.append(axis.irecv(arrived[source], source))
    for step in range(1, axis.size):
        to = (axis.index + step) % axis.size
        requests.append(axis.isend(np.asarray(blocks[to], order="C"), to))
    for request in requests:
        request.wait()
    return arrived


@watch.collective
def all_to_all(x, axis, split: int, split_sizes, join: int, join_sizes):
    """One array, cut along `join`, becomes cut along `split`: Shard(join) -> Shard(split).

    x [.., sum(split_sizes), .., join_sizes[i], ..] -> [.., split_sizes[i], .., sum(join_sizes), ..]: rank i cuts its shard along
    `split`, sends part j to rank j (`exchange`), and joins what arrives along `join`.  Swapping the two leads back.
    Messages p-1; elements (p-1)/p of the shard, T/p; time (p-1) alpha + (p-1)/p**2 n beta.
    """
    split, split_sizes = checked("all_to_all", x, split, split_sizes, axis, whole=True)
    join, join_sizes = checked("all_to_all", x, join, join_sizes, axis, whole=False)
    if split == join:
        raise ValueError(f"all_to_all on {axis.name}: split and join are both dim {split}, and must be two dims")
    blocks = [part_of(x, split, part) for part in slices(split_sizes)]
    shapes = [list(blocks[axis.index].shape) for _ in join_sizes]
    for shape, size in zip(shapes, join_sizes):
        shape[join] = size
    return np.concatenate(exchange(blocks, axis, shapes), axis=join)


def barrier(axis):
    """Nobody leaves before everybody has come.

    Dissemination: in round k rank i tells rank i + 2**k and hears from i - 2**k; after round k it has heard, directly or not, from
    2**(k+1) ranks.  Messages ceil(log2 p), all empty; time ceil(log2 p) alpha.  Source: Hensgen, Finkel and Manber, "Two algorithms
    for barrier synchronization" (1988).
    """
    nothing = np.empty(0, np.uint8)
    with watch.calling(axis, "barrier"):
        reach = 1
        while reach < axis.size:
            coming = axis.irecv(np.empty(0, np.uint8), (axis.index - reach) % axis.size)
            axis.send(nothing, (axis.index + reach) % axis.size)
            coming.wait()
            reach *= 2
