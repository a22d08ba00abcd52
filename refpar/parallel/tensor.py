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

from refpar.comm.pairs import copy_to, gather_from, reduce_from, reduce_scatter_to
from refpar.config import share, shares
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
        return batch.cut(columns=share(batch.tokens.shape[1], tp.size, tp.index))
    return mine
