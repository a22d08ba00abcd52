"""Data parallelism: every rank holds the whole model and some of the rows.

Gradients are sums (law 3).  The targets of the whole step are counted first, over micro-batches and ranks, because backward starts
from one over that count; then each rank adds up the gradients of its micro-batches, and one bucketed all_reduce adds up the ranks.
Nothing is averaged, so unequal rows, masks and micro-batches need no correction, and a rank without any row adds zeros.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from refpar import watch
from refpar.comm.collectives import all_reduce
from refpar.config import Layout
from refpar.nn.chain import Chain
from refpar.nn.gradient import add, loss_and_gradients
from refpar.parallel.placement import Sum, gradient_sums, shard_axes

BUCKET = 4 << 20        # bytes: large enough for bandwidth, small enough to keep the copy in the cache's neighbourhood


def count_targets(batches: list, mesh) -> int:
    """Targets of the whole step: over this rank's micro-batches, and over the ranks that hold other tokens."""
    mine = sum(int((batch.targets >= 0).sum()) for batch in batches)
    return int(all_reduce(np.array([mine]), mesh.axis("dp", "cp"))[0])


def accumulate(chain: Chain, params: dict, batches: list, count: int):
    """(summed loss, gradients) of this rank's micro-batches, added up."""
    loss, grads = loss_and_gradients(chain, params, batches[0], count)
    for batch in batches[1:]:
        more_loss, more_grads = loss_and_gradients(chain, params, batch, count)
        loss, grads = loss + more_loss, add(grads, more_grads)
    watch.held("gradient", grads)
    return loss, grads


def sum_loss(loss: float, mesh) -> float:
    """The summed loss of the whole step: over the ranks that hold other tokens, and over the stages, of which the last has it."""
    return float(all_reduce(np.array([loss], np.float64), mesh.axis("dp", "pp", "cp"))[0])


@dataclass
class Bucket:
    """Gradients that travel together: they are summed over the same ranks, and all are cut, or none.

    A ring adds up the ranks in another order for each of its chunks, so replicas are bitwise alike only where all of them have a gradient
    at the same place of its bucket: not where cut gradients, of another size on each rank, stand before it."""
    over: Sum
    names: list[tuple[str, str]] = field(default_factory=list)      # (layer, parameter)
    bytes: int = 0


def buckets(grads: dict, chain: Chain, layout: Layout, limit: int = BUCKET) -> list[Bucket]:
    """Last layers first, for their gradients are ready first; at most `limit` bytes together, and a larger one goes alone."""
    filled: list[Bucket] = []
    open_bucket: dict[tuple, Bucket] = {}
    dims = chain.dims()
    for (layer, name), over in reversed(gradient_sums(chain, layout).items()):
        size = grads[layer][name].nbytes
        kind = over, any(getattr(layout, axis) > 1 for axis in shard_axes(dims[layer][name]))
        if kind not in open_bucket or open_bucket[kind].bytes + size > limit:
            open_bucket[kind] = Bucket(over)
            filled.append(open_bucket[kind])
        open_bucket[kind].names.append((layer, name))
        open_bucket[kind].bytes += size
    return filled


def reduce_gradients(grads: dict, chain: Chain, mesh, limit: int = BUCKET) -> dict:
    """The gradients, summed over the ranks that hold other addends of them: one all_reduce a bucket."""
    whole: dict = {layer: {} for layer in grads}
    for bucket in buckets(grads, chain, mesh.layout, limit):
        flat = np.concatenate([grads[layer][name].ravel() for layer, name in bucket.names])
        flat = all_reduce(flat, bucket.over.on(mesh))
        at = 0
        for layer, name in bucket.names:
            grad = grads[layer][name]
            whole[layer][name] = flat[at:at + grad.size].reshape(grad.shape)
            at += grad.size
    return whole
