"""Collective matmul: an all_gather or a reduce_scatter of sequence parallelism taken apart into the hops of a ring, with a part of the
matrix product between one hop and the next.

    gather and multiply     y_j = x_j w as each rank's tokens x_j come round (`travel`), the next hop under way
    multiply and scatter    the sum for rank j's tokens is on its way to j, and each rank adds a_j w when it comes by

So every hop but the first can hide behind a product, where the plain form would wait for all of them.  Each is the other's transpose:
the gradient of what was gathered is scattered, and of what was scattered, gathered (law 4).

p ranks, T elements of the whole array: p-1 messages, and elements sent T less those of the next rank's shard: as many as a ring
all_gather or reduce_scatter sends.  Both fill a layer's seams `into` and `out_of` (`nn/projection.py`).

Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep learning models".
"""
from __future__ import annotations

from typing import Callable

import numpy as np

from refpar import watch
from refpar.comm.shards import slices
from refpar.config import shares
from refpar.nn.product import Product
from refpar.nn.projection import mapped, mapped_backward
from refpar.nn.seams import Pair
from refpar.parallel.travel import travel


def scattered(part: Callable[[int], np.ndarray], axis, sizes: list[int]) -> np.ndarray:
    """The sum over all ranks of their part(my index), [B, S_mine, D].  part(rank) is my addend for that rank's tokens: it is made while
    the sum of those before me is on its way here."""
    total = part((axis.index - 1) % axis.size)
    for hop in range(1, axis.size):
        rank = (axis.index - 1 - hop) % axis.size               # at last my own
        coming = np.empty((total.shape[0], sizes[rank], total.shape[2]), total.dtype)
        watch.held("received", [total, coming])
        requests = [axis.irecv(coming, (axis.index - 1) % axis.size), axis.isend(total, (axis.index + 1) % axis.size)]
        mine = part(rank)
        for request in requests:
            request.wait()
        total = coming + mine
    return total


def overlapped(tp) -> tuple[Pair, Pair]:
    """Fillings of `into` and `out_of` where tokens are cut over tp outside the layer: x, y [B, S/tp, D], and within it [B, S, ...]."""
    def cut(batch):
        sizes = shares(batch.tokens.shape[1], tp.size)
        return sizes, slices(sizes)

    def tokens(x, part):
        return np.ascontiguousarray(x[..., part, :])            # of a stacked map [n, B, S, O] too

    def into_forward(x, w, batch):
        sizes, parts = cut(batch)
        rows, length = batch.tokens.shape
        whole = np.empty((rows, length, x.shape[2]), x.dtype)                       # [B, S, D]
        ys = {name: np.empty((*weight.shape[:-2], rows, length, weight.shape[-1]), x.dtype) for name, weight in w.items()}
        with watch.calling(tp, "gather_matmul"):
            for rank, shard in travel(x, tp, [(rows, size, x.shape[2]) for size in sizes]):
                whole[:, parts[rank]] = shard
                for name, weight in w.items():
                    ys[name][..., parts[rank], :] = mapped(shard, weight)
        return ys, {"x": whole}

    def into_backward(dys, saved, w, batch):
        sizes, parts = cut(batch)

        def addend(rank):
            shards = (mapped_backward(tokens(dys[name], parts[rank]), None, weight)[0] for name, weight in w.items())
            return sum(shards, next(shards))
        with watch.calling(tp, "matmul_scatter"):
            dx = scattered(addend, tp, sizes)                                       # [B, S/tp, D]
        return dx, {name: products(saved["x"], dys[name]) for name in w}

    def out_forward(a, w, batch):
        sizes, parts = cut(batch)
        with watch.calling(tp, "matmul_scatter"):
            y = scattered(lambda rank: mapped(tokens(a, parts[rank]), w), tp, sizes)    # [B, S/tp, D]
        return y, {"x": a}

    def out_backward(dy, saved, w, batch):
        sizes, parts = cut(batch)
        dwhole, da = np.empty((*batch.tokens.shape, dy.shape[2]), dy.dtype), np.empty_like(saved["x"])  # [B, S, D], ... [B, S, F/tp]
        with watch.calling(tp, "gather_matmul"):
            for rank, shard in travel(dy, tp, [(len(dy), size, dy.shape[2]) for size in sizes]):
                dwhole[:, parts[rank]] = shard
                da[:, parts[rank]] = mapped_backward(shard, None, w)[0]
        return da, Product(saved["x"], dwhole)

    return Pair(into_forward, into_backward), Pair(out_forward, out_backward)


def products(x, dy):
    """The weight gradient of one map, or of n stacked ones."""
    return Product(x, dy) if dy.ndim == x.ndim else [Product(x, part) for part in dy]
