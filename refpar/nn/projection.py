"""The linear maps at a layer's two ends, as seams: `into`, several maps of the layer's input, and `out_of`, the last map.

    into.forward(x, w, batch) -> ys, saved          w: name -> weight [D, O], or [n, D, O], n maps of one name; ys: name -> y
    into.backward(dys, saved, w, batch) -> dx, grads
    out_of.forward(a, w, batch) -> y, saved         w: one weight [J, D]
    out_of.backward(dy, saved, w, batch) -> da, grad

Here they are just that, and x is kept once for all of them.  `parallel/overlap.py` fills them with maps that gather x, or scatter y,
step by step, so that messages hide behind products.
"""
from __future__ import annotations

from functools import reduce

import numpy as np

from refpar.nn.ops import linear_backward, linear_forward, stacked_backward, stacked_forward
from refpar.nn.seams import Pair


def mapped(x, w):
    """x [..., D], w [D, O] or [n, D, O] -> [..., O] or [n, ..., O]."""
    return (stacked_forward if w.ndim == 3 else linear_forward)(x, w)[0]


def mapped_backward(dy, x, w):
    """dx [..., D], and the gradient of w as one Product, or n of them."""
    return (stacked_backward if w.ndim == 3 else linear_backward)(dy, {"x": x}, w)


def into_forward(x, w, batch):
    """Each map of x."""
    return {name: mapped(x, weight) for name, weight in w.items()}, {"x": x}


def into_backward(dys, saved, w, batch):
    """The sum of all maps' dx, and each one's gradient."""
    parts = {name: mapped_backward(dys[name], saved["x"], weight) for name, weight in w.items()}
    return reduce(lambda a, b: np.add(a, b, out=a), [dx for dx, _ in parts.values()]), {name: grad for name, (_, grad) in parts.items()}


INTO = Pair(into_forward, into_backward)
OUT_OF = Pair(lambda a, w, batch: linear_forward(a, w), lambda dy, saved, w, batch: linear_backward(dy, saved, w))
