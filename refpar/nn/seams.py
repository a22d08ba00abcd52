"""Layers, and the seams in them.

A layer is written once.  Where data of another rank may be needed it calls a *seam*: a pair of functions, forward and backward,
that `nn` fills with the plain thing (pass it on) and `parallel` with a communication and its conjugate.  A layer has no flag, no
mesh axis and no `if` for parallelism: all that is decided here, once, by the filling.

    enter   x of the layer, after its norm             leave   y of the layer, before it joins the residual stream
    into    the linear maps of the layer's input       out_of  its last linear map
    core    attention of given q, k, v                 mix     Mamba-2's conv and scan, with their weights
    scan    of given x, dt, B, C, in either Mamba
    carry   what lies before my tokens                 over    completes a Partial value inside a layer
    drop    dropout of a residual branch               mine    the tokens of a batch that stand here, outside the seams
    order   wraps a layer that wants its tokens in another order
    first   where my part of the vocabulary begins     lengths channels of each group of Mamba-2's norm that are here
"""
from __future__ import annotations

from typing import Any, Callable, NamedTuple


class Pair(NamedTuple):
    """A linear map and its conjugate: `backward` is the transpose of `forward`."""
    forward: Callable
    backward: Callable


class Layer(NamedTuple):
    """One layer of a chain.

    forward(x, w, batch, before) -> y, after, saved      what lies before these tokens goes in, what they leave behind comes out
    backward(dy, dafter, saved, w, batch) -> dx, dbefore, grads
    inside, outside: parameter -> dims, such as {"q": "D HE/tp"}: those that stand within enter and leave, and those around them.
    start(w, batch) -> before: nothing before the first token.  A layer without memory has None for all four.
    """
    forward: Callable
    backward: Callable
    inside: dict[str, str]
    outside: dict[str, str]
    start: Callable = lambda w, batch: None

    @property
    def dims(self) -> dict[str, str]:
        """Every parameter's dims."""
        return self.inside | self.outside


def _same(x):
    return x


def _same_in_batch(x, batch):
    return x


def _carry_alone(merge, own, given):
    """carry(merge, own, given) -> here, on: what lies before my tokens, and what lies before those who follow me.
    Alone, nobody stands between: here is what was given, and I hand on the merge of that and my own."""
    return given, merge(given, own)


SAME = Pair(_same, _same)
KEEP = Pair(_same_in_batch, _same_in_batch)
ALONE = Pair(_carry_alone, _carry_alone)


class Seams(NamedTuple):
    """The fillings of one layer's seams; as they stand here, those of a single process."""
    enter: Pair = KEEP
    leave: Pair = KEEP
    drop: Pair = KEEP
    over: Pair = SAME
    carry: Pair = ALONE
    into: Any = None            # None: the plain maps, `nn.projection`
    out_of: Any = None
    core: Any = None            # None: the layer's own, `nn.attention`
    mix: Any = None             # None: the layer's own, `nn.mamba2`
    scan: Any = None            # None: the layer's own, in chunks
    mine: Callable = _same
    order: Callable = _same
    first: int = 0
    lengths: Any = None         # None: whole groups
