"""Tokens brought from one order over cp to another: a stream that attention wants in zig-zag, led through a conv and a scan, which
want each rank to have one run of it.

Every token is sent once, to the rank that will hold it, if that is another: c-1 messages of rank i, some empty, and B D elements
for each column that leaves it.  (From zig-zag to contiguous, c ranks of one size: all but about 1/c of them, twice a layer, in
forward and in backward.)  A permutation's transpose is its inverse: the pair leads in and out, in both directions.
"""
from __future__ import annotations

from functools import partial
from typing import Callable

import numpy as np

from refpar import watch
from refpar.comm.collectives import exchange
from refpar.nn.seams import Layer, Pair
from refpar.parallel.order import columns, whole_of


def order(cp, was: str, now: str) -> Pair:
    """x [B, S/cp, ...] of tokens in the order `was` -> of those in the order `now`, by the columns of `batch.whole`."""
    return Pair(partial(_brought, cp=cp, was=was, now=now), partial(_brought, cp=cp, was=now, now=was))


def _brought(x, batch, cp, was: str, now: str):
    length = whole_of(batch).tokens.shape[1]
    held, wanted = ([columns(way, length, cp.size, rank) for rank in range(cp.size)] for way in (was, now))
    leaving = [x[:, np.isin(held[cp.index], some)] for some in wanted]
    coming = [some[np.isin(some, wanted[cp.index])] for some in held]                   # columns, rank by rank
    shapes = [(len(x), len(some), *x.shape[2:]) for some in coming]
    with watch.errand(cp.name, "order"):
        arrived = np.concatenate(exchange(leaving, cp, shapes), axis=1)
    return arrived[:, np.argsort(np.concatenate(coming))]                               # in every order a rank's columns rise


def ordered(layer: Layer, pair: Pair, rebatch: Callable) -> Layer:
    """The layer, run in another order: `pair` leads there from the stream's, and rebatch(batch) is the batch there."""
    def forward(x, w, batch, before):
        y, after, saved = layer.forward(pair.forward(x, batch), w, rebatch(batch), before)
        return pair.backward(y, batch), after, saved

    def backward(dy, dafter, saved, w, batch):
        dx, dbefore, grads = layer.backward(pair.forward(dy, batch), dafter, saved, w, rebatch(batch))
        return pair.backward(dx, batch), dbefore, grads

    return layer._replace(forward=forward, backward=backward)
