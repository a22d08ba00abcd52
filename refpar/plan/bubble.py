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


FORMULAS: dict[str, Row] = {
    "gpipe": Row(lambda s, F, B, W: (s.p - 1) * (F + B + W), lambda s, r: s.m, _always, "Huang 2019"),
    "1f1b": Row(lambda s, F, B, W: (s.p - 1) * (F + B + W), lambda s, r: min(s.m, s.p - r), _always, "Narayanan 2021"),
    "eager-1f1b": Row(lambda s, F, B, W: (s.p - 1) * (F + B + W), lambda s, r: min(s.m, 2 * (s.p - r) - 1), _always, "AlpaComm"),
    "interleaved": Row(lambda s, F, B, W: (s.p - 1) * (F + B + W) / s.v,
                       lambda s, r: min(s.m * s.v, 2 * (s.p - 1 - r) + (s.v - 1) * s.p + 1),
                       lambda s, F, B, W: s.m % s.p == 0, "Narayanan 2021"),
    "zb-h1": Row(lambda s, F, B, W: (s.p - 1) * (F + B - W), lambda s, r: min(s.m, s.p),
                 lambda s, F, B, W: s.m >= s.p, "Qi 2023"),
    "zb-h2": Row(lambda s, F, B, W: (s.p - 1) * (F + B - 2 * W), lambda s, r: min(s.m, 2 * s.p - 1),
                 lambda s, F, B, W: s.m >= 2 * s.p - 1, "Qi 2023"),
    "zb-v": Row(lambda s, F, B, W: 0, lambda s, r: min(2 * s.m, 2 * s.p), lambda s, F, B, W: s.m >= 2 * s.p - 1 and F == B == W, "Qi 2024"),
    "dualpipe": Row(lambda s, F, B, W: (s.p // 2 - 1) * (F + B + W + B + W - 3 * W), lambda s, r: min(s.m, s.p + 1),
                    lambda s, F, B, W: s.m >= 2 * s.p and s.m % 2 == 0, "DeepSeek-V3"),
    "sliced": Row(lambda s, F, B, W: (s.p - 1) * (F + B + W) / s.K, lambda s, r: s.m * s.K, _always, "Li 2021"),
    "forward-only": Row(lambda s, F, B, W: (s.p - 1) * F / s.K, lambda s, r: 0, _always, ""),
    "pipedream": Row(lambda s, F, B, W: (s.p - 1) * (F + B + W), lambda s, r: min(s.m, s.p - r), _always, "Narayanan 2019"),
}
