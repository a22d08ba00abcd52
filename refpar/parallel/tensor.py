"""Tensor parallelism: what stands around a layer whose weights are cut over tp, and the sequence parallelism that goes with it.

A layer's first linear maps are cut by columns and its last by rows (Shoeybi et al. 2019, Megatron-LM, section 3): each rank computes
an addend of the layer's output, from some heads or some features, and only `leave` adds them up.

    tensor      x [B, S, D] Invariant  -> Replicate  nothing        y Partial -> Invariant  all_reduce
    sequence    x [B, S/tp, D] Shard   -> Replicate  all_gather     y Partial -> Shard      reduce_scatter

The second moves as many bytes as the first, an all_reduce being a reduce_scatter and an all_gather, and in between, where norms,
biases, dropout and the residual stream stand, each rank has only its share of the tokens (Korthikanti et al. 2022).

Elements sent per rank and layer, p ranks, forward, and again backward: 2 (p-1)/p B S D.
"""
from __future__ import annotations

import numpy as np

from refpar.comm.pairs import copy_to, gather_from, over, reduce_from, reduce_scatter_to
from refpar.config import Model, share, shares
from refpar.nn.seams import Pair

SEQUENCE = 1            # the dim of tokens in [B, S, D]


def steady(pair) -> Pair:
    """A communication as a seam's filling: it is the same for every batch."""
    return Pair(lambda x, batch: pair.forward(x), lambda dy, batch: pair.backward(dy))


def by_tokens(axis, communication) -> Pair:
    """The same where the sizes of shards depend on how many tokens the batch has here."""
    def pair(batch):
        return communication(axis, SEQUENCE, shares(batch.tokens.shape[1], axis.size))
    return Pair(lambda x, batch: pair(batch).forward(x), lambda dy, batch: pair(batch).backward(dy))


def tensor(tp) -> tuple[Pair, Pair]:
    """Enter and leave: x whole, y one addend of the whole."""
    return steady(copy_to(tp)), steady(reduce_from(tp))


def sequence(tp) -> tuple[Pair, Pair]:
    """Enter and leave: outside the layer each rank has its share of the tokens."""
    return by_tokens(tp, gather_from), by_tokens(tp, reduce_scatter_to)


def share_of_tokens(tp):
    """The batch of the tokens that this rank has outside the layers, under sequence parallelism."""
    def mine(batch):
        return batch._replace(whole=None).cut(columns=share(batch.tokens.shape[1], tp.size, tp.index))
    return mine


def norm_groups(config: Model, tp) -> tuple[list[int], Pair]:
    """(channels here of each group of Mamba-2's norm, what completes a statistic [B, S, Q] of these groups).

    Neighbours whose border lies within a group are linked.  Each adds its part of the statistic to an array of all groups among
    those that are linked so, and one all_reduce completes it; where each rank's groups are whole, nobody is linked or sends.
    """
    width, cuts = config.norm_width, [config.part("MP", tp.size, rank) for rank in range(tp.size)]
    mine, ranks = cuts[tp.index], linked(cuts, tp.index, width)
    first = cuts[ranks[0]].start // width
    groups = [share_of_group(mine, group, width) for group in range(first, -(-cuts[ranks[len(ranks) - 1]].stop // width))]
    here = [index for index, channels in enumerate(groups) if channels]
    pair = over(tp.among(ranks))

    def among(complete):
        def completed(part):
            every = np.zeros((*part.shape[:2], len(groups)), part.dtype)            # [B, S, Q of the linked]
            every[..., here] = part
            return complete(every)[..., here]
        return completed
    return [groups[index] for index in here], Pair(among(pair.forward), among(pair.backward))


def linked(cuts: list[slice], rank: int, width: int) -> list[int]:
    """The ranks that `rank` is linked with, itself among them: each border between them lies within a group of `width` channels."""
    if cuts[rank].start == cuts[rank].stop:
        return [rank]
    first, last = rank, rank
    while cuts[first].start % width:
        first -= 1
    while cuts[last].stop % width:
        last += 1
    return [r for r in range(first, last + 1) if cuts[r].stop > cuts[r].start]


def share_of_group(cut: slice, group: int, width: int) -> int:
    """How many channels of a group lie in the cut."""
    return max(0, min(cut.stop, (group + 1) * width) - max(cut.start, group * width))
