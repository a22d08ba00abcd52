"""What a pipeline schedule costs: closed formulas for the time that it wastes and the activations that it holds.

p ranks, m micro-batches, v stages a rank, K slices of the sequence.  F, B and W are the times of one rank's whole share of the layers for one
micro-batch: forward, backward to the activations, and weight gradients, so that an ordinary backward costs B + W.  A formula holds
where its row says so, for equal stages and messages that take no time; the tests compare each with the simulated schedule, exactly.
The survey's table counts B as the whole backward: its (p-1)(F+B-2W) of ZB-H1 is (p-1)(F+B-W) here.
"""
from __future__ import annotations

from typing import Callable, NamedTuple


class Sizes(NamedTuple):
    """Of a pipeline: ranks, micro-batches, virtual stages a rank, slices a micro-batch."""
    p: int
    m: int
    v: int = 1
    K: int = 1


class Row(NamedTuple):
    """bubble: time above the ideal m(F+B+W).  held: activations in flight at most on rank r, counted in ops (a stage, a micro-batch,
    a slice).  where: what must hold for both to be exact; elsewhere `held` is still enough."""
    bubble: Callable
    held: Callable
    where: Callable
    source: str


def _always(s, F, B, W) -> bool:
    return True


FORMULAS: dict[str, Row] = {}
