"""The collectives: what they mean, and the door of each.  How they are done stands in the table of `refpar/comm/choose.py`.

Notation, here and in the algorithms: p ranks on the axis, T elements of the whole array, n its bytes; a message takes alpha + beta
* bytes, an addition gamma a byte.  Every message of the formulas is sent, an empty one too, so that uneven and empty shards need no
case of their own.  Formulas for one rank, exact for uneven sizes, stand in `refpar/plan/volume.py`.

Arguments are never written, and what is returned may be the argument or a view of it: nobody writes to either.  The order of
summation depends on the algorithm, p and the sizes alone, so a run repeats itself bitwise, and all ranks get the same bits.

    algorithm    its name in the table, or itself (`refpar/algorithms` has more); None: the table chooses, by bytes, ranks and dtype
    op           a numpy ufunc that is associative and commutative: np.add, np.maximum, np.minimum, ...; "sum" below means this
    segment      bytes of a message of those algorithms that send long arrays bit by bit; None: as it is best
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm import choose
from refpar.comm.choose import Algorithm, Task
from refpar.comm.shards import checked, from_front, part_of, row_of, slices, to_front


@watch.collective
def all_reduce(x, axis, op=np.add, algorithm: Algorithm | str | None = None, segment: int | None = None):
    """The sum of every rank's x, on all ranks: Partial -> Replicate or Invariant.  x of one shape on all ranks."""
    x = np.asarray(x, order="C")
    task = choose.task_of(x, axis, op=op, segment=segment)
    return choose.algorithm("all_reduce", algorithm, task).run(x, axis, task)


@watch.collective
def reduce_scatter(x, axis, dim: int = 0, sizes=None, op=np.add, algorithm: Algorithm | str | None = None):
    """The sum of every rank's x, of which rank i keeps shard i along `dim`: Partial -> Shard(dim).

    x [.., sum(sizes), ..] -> [.., sizes[i], ..].
    """
    dim, sizes = checked("reduce_scatter", x, dim, sizes, axis, whole=True)
    front = to_front(x, dim)                                                            # [sum(sizes), ...]
    lengths = [size * row_of(front) for size in sizes]
    task = choose.task_of(front, axis, lengths, op=op)
    part = choose.algorithm("reduce_scatter", algorithm, task).run(front.reshape(front.size), axis, slices(lengths), task)
    return from_front(part.reshape(sizes[axis.index], *front.shape[1:]), dim)


@watch.collective
def all_gather(x, axis, dim: int, sizes, algorithm: Algorithm | str | None = None):
    """Every rank's shard, side by side along `dim`, on all ranks: Shard(dim) -> Replicate or Invariant.

    x [.., sizes[i], ..] -> [.., sum(sizes), ..].
    """
    dim, sizes = checked("all_gather", x, dim, sizes, axis, whole=False)
    front = to_front(x, dim)                                                            # [sizes[i], ...]
    lengths = [size * row_of(front) for size in sizes]
    whole = np.empty((sum(sizes), *front.shape[1:]), x.dtype)
    flat, parts = whole.reshape(whole.size), slices(lengths)
    flat[parts[axis.index]] = front.reshape(front.size)
    task = choose.task_of(front, axis, lengths)
    choose.algorithm("all_gather", algorithm, task).run(flat, axis, parts, task)
    return from_front(whole, dim)


@watch.collective
def broadcast(x, axis, root: int = 0, algorithm: Algorithm | str | None = None, segment: int | None = None):
    """The root's x, on all ranks.  Elsewhere x says only the shape and dtype (`trees.like` makes one)."""
    _check_root("broadcast", root, axis)
    x = np.asarray(x, order="C") if axis.index == root else x
    task = choose.task_of(x, axis, root=root, segment=segment)
    return choose.algorithm("broadcast", algorithm, task).run(x, axis, task)


@watch.collective
def reduce(x, axis, root: int = 0, op=np.add, algorithm: Algorithm | str | None = None, segment: int | None = None):
    """The sum of every rank's x, on the root; None elsewhere.  x of one shape on all ranks."""
    _check_root("reduce", root, axis)
    x = np.asarray(x, order="C")
    task = choose.task_of(x, axis, root=root, op=op, segment=segment)
    return choose.algorithm("reduce", algorithm, task).run(x, axis, task)


def _check_root(call: str, root: int, axis):
    if not 0 <= root < axis.size:
        raise ValueError(f"{call} on {axis.name}: root {root} must be an index from 0 to {axis.size - 1}")


@watch.collective
def exchange(blocks, axis, shapes, algorithm: Algorithm | str | None = None):
    """Block j of every rank goes to rank j: blocks of any shapes, and `shapes` are those that will arrive, one for each rank.

    Returns the arrived blocks in the order of the ranks (this rank's own among them, as it was given).
    """
    if len(blocks) != axis.size or len(shapes) != axis.size:
        raise ValueError(f"exchange on {axis.name}: {len(blocks)} blocks and {len(shapes)} shapes must be {axis.size}, one a rank")
    if tuple(shapes[axis.index]) != blocks[axis.index].shape:
        raise ValueError(f"exchange on {axis.name}: rank {axis.index} keeps a block of shape {list(blocks[axis.index].shape)}, and "
                         f"shapes make it {list(shapes[axis.index])}")
    task = Task([[]] * axis.size, blocks[axis.index].dtype, axis.nodes())               # nobody knows the sizes of all blocks
    return choose.algorithm("exchange", algorithm, task).run(blocks, axis, shapes, task)


@watch.collective
def all_to_all(x, axis, split: int, split_sizes, join: int, join_sizes, algorithm: Algorithm | str | None = None):
    """One array, cut along `join`, becomes cut along `split`: Shard(join) -> Shard(split).

    x [.., sum(split_sizes), .., join_sizes[i], ..] -> [.., split_sizes[i], .., sum(join_sizes), ..]: rank i cuts its shard along
    `split`, sends part j to rank j, and joins what arrives along `join`.  Swapping the two leads back.
    """
    split, split_sizes = checked("all_to_all", x, split, split_sizes, axis, whole=True)
    join, join_sizes = checked("all_to_all", x, join, join_sizes, axis, whole=False)
    if split == join:
        raise ValueError(f"all_to_all on {axis.name}: split and join are both dim {split}, and must be two dims")
    blocks = [part_of(x, split, part) for part in slices(split_sizes)]
    shapes = [list(blocks[axis.index].shape) for _ in join_sizes]
    for shape, size in zip(shapes, join_sizes):
        shape[join] = size
    rest = int(np.prod([size for dim, size in enumerate(x.shape) if dim not in (split, join)], dtype=np.int64))
    task = choose.task_of(x, axis, [[ours * theirs * rest for theirs in split_sizes] for ours in join_sizes])
    return np.concatenate(choose.algorithm("all_to_all", algorithm, task).run(blocks, axis, shapes, task), axis=join)


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
