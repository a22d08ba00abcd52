"""What a pipeline schedule costs: closed formulas for the time that it wastes and the activations that it holds.

Time is told of one rank's whole share of the layers and one micro-batch; B is backward to the activations alone, so that an ordinary
backward takes B + W.  The survey's table counts B as both: its (p-1)(F+B-2W) of ZB-H1 is (p-1)(F+B-W) here.  A formula is for equal
stages and messages that take no time, and where its row says; the tests hold each against the simulated schedule, exactly.
"""
from __future__ import annotations

from typing import Any, Callable, NamedTuple


class Sizes(NamedTuple):
    """Of a pipeline: p ranks, m micro-batches, v stages on a rank, K slices of the sequence."""
    p: int
    m: int
    v: int = 1
    K: int = 1


class Times(NamedTuple):
    """Of one rank and micro-batch; pair: of a forward and a backward that hide each other's messages, in DualPipe."""
    F: Any
    B: Any
    W: Any
    pair: Any

    @property
    def sum(self):
        """Of all the work."""
        return self.F + self.B + self.W


class Row(NamedTuple):
    """bubble: the longest time that a rank idles, of the longest span from a rank's first step to its last.  held: the most
    activations in flight on rank r, counted in ops (a stage, a micro-batch, a slice) from their F to their W.  exact: where the bubble
    is that; elsewhere it is larger.  `held` is never exceeded, and reached where micro-batches are as many as `exact` says."""
    bubble: Callable[[Sizes, Times], Any]
    held: Callable[[Sizes, int], int]
    exact: Callable[[Sizes, Times], bool] = lambda s, t: True


def _filled(s: Sizes, t: Times):
    """The last backwards come (p-1)(F+B) late, and W fills the gaps between them, but never beyond the F that it makes wait."""
    return (s.p - 1) * (t.F + t.B - min(t.F, t.W))


_PLAIN = Row(lambda s, t: (s.p - 1) * t.sum, lambda s, r: min(s.m, s.p - r))

FORMULAS: dict[str, Row] = {
    "gpipe": _PLAIN._replace(held=lambda s, r: s.m),
    "1f1b": _PLAIN,
    "pipedream": _PLAIN,                    # once, when training begins and ends; activations and versions of the weights held alike
    "eager-1f1b": _PLAIN._replace(held=lambda s, r: min(s.m, 2 * (s.p - r) - 1)),
    "interleaved": Row(lambda s, t: (s.p - 1) * t.sum / s.v,
                       lambda s, r: min(s.m * s.v, 2 * (s.p - 1 - r) + (s.v - 1) * s.p + 1), lambda s, t: s.m % s.p == 0),
    "zb-h1": Row(_filled, lambda s, r: min(s.m, s.p), lambda s, t: s.m >= s.p),
    "zb-h2": Row(lambda s, t: (s.p - 1) * max(0, t.F + t.B - 2 * min(t.F, t.W)), lambda s, r: min(s.m, 2 * s.p - 1),
                 lambda s, t: s.m >= 2 * s.p - 1),
    "zb-v": Row(lambda s, t: 0, lambda s, r: 2 * min(s.m, s.p), lambda s, t: t.F == t.B == t.W and s.m >= 2 * s.p - 1),
    # The table of DualPipe says F&B + B - 3W, its B being B + W here: the same where F = B.
    "dualpipe": Row(lambda s, t: (s.p // 2 - 1) * (t.pair + t.F - 2 * t.W), lambda s, r: min(s.m, s.p + 1),
                    lambda s, t: t.W <= min(t.F, t.B) and s.m % 2 == 0 and s.m >= 2 * s.p),
    "sliced": Row(lambda s, t: (s.p - 1) * t.sum / s.K, lambda s, r: s.m * s.K),
    "forward-only": Row(lambda s, t: 0, lambda s, r: 0),     # rank r starts and ends r forwards later
}


def bubble(name: str, sizes: Sizes, F, B, W, pair=None):
    """The time that the schedule wastes, or None where no closed formula is exact."""
    row, times = FORMULAS[name], Times(F, B, W, F + B + W if pair is None else pair)
    return row.bubble(sizes, times) if row.exact(sizes, times) else None


def held(name: str, sizes: Sizes) -> tuple[int, ...]:
    """The most activations in flight on each rank, in ops."""
    return tuple(FORMULAS[name].held(sizes, rank) for rank in range(sizes.p))
