"""The freezer: whoever writes into an array that it was lent fails at that line.

Arrays are given, not lent (law 8): a function writes into what it made, or into an argument called `out` or `into`.  A chain that
is built frozen makes read-only what goes into a layer and what comes out, both ways, `saved` among it, and what crosses a seam.  It
computes the same as before.  An array that is a view takes its owner with it, so that nobody writes past it.
"""
from __future__ import annotations

from functools import wraps
from typing import Callable

import numpy as np

from refpar.nn.chain import Chain
from refpar.nn.seams import Layer, Pair, Seams
from refpar.watch import arrays_of


def freeze(tree):
    """Make every array of a nest read-only, and what it is a view of; the nest itself is returned."""
    for array in arrays_of(tree):
        while isinstance(array, np.ndarray):
            array.flags.writeable = False
            array = array.base
    return tree


def lent(function: Callable) -> Callable:
    """`function`, whose arguments and results are read-only."""
    @wraps(function)
    def guarded(*args):
        return freeze(function(*freeze(args)))
    return guarded


def frozen(chain: Chain) -> Chain:
    """The chain with every layer's forward and backward guarded."""
    return chain._replace(layers=tuple((name, frozen_layer(layer)) for name, layer in chain.layers))


def frozen_layer(layer: Layer) -> Layer:
    """A layer that lends everything it gets and gives."""
    return layer._replace(forward=lent(layer.forward), backward=lent(layer.backward), start=lent(layer.start))


def frozen_seams(fill: Callable[[str, str], Seams]) -> Callable[[str, str], Seams]:
    """The fillings, with both functions of every pair guarded."""
    def guarded(name, kind):
        seams = fill(name, kind)
        pairs = {seam: Pair(lent(pair.forward), lent(pair.backward)) for seam, pair in seams._asdict().items()
                 if isinstance(pair, Pair)}
        return seams._replace(**pairs)
    return guarded
