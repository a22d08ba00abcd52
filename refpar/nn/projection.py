"""The linear maps at a layer's two ends, as seams: `into`, several maps of the layer's input, and `out_of`, the last map.

    into.forward(x, w, batch) -> ys, saved          w: name -> weight [D, O], or [n, D, O], n maps of one name; ys: name -> y
    into.backward(dys, saved, w, batch) -> dx, grads
    out_of.forward(a, w, batch) -> y, saved         w: one weight [J, D]
    out_of.backward(dy, saved, w, batch) -> da, grad

Here they are just that, and x is kept once for all of them.  `parallel/overlap.py` fills them with maps that gather x, or scatter y,
step by step, so that messages hide behind products.
"""
from __future__ import annotations

from refpar.nn.ops import linear_backward, linear_forward, stacked_backward, stacked_forward
from refpar.nn.seams import Pair


def mapped(x, w):
    """x [..., D], w [D, O] or [n, D, O] -> [..., O] or [n, ..., O]."""
    return (stacked_forward if w.ndim == 3 else linear_forward)(x, w)[0]


def mapped_backward(dy, x, w):
    """dx [..., D], and the gradient of w as one Product, or n of them."""
    return (stacked_backward if w.ndim == 3 else linear_backward)(dy, {"x": x}, w)


def _into(x, w, batch):
    return {name: mapped(x, weight) for name, weight in w.items()}, {"x": x}


def _into_backward(dys, saved, w, batch):
    dx, grads = None, {}
    for name, weight in w.items():
        part, grads[name] = mapped_backward(dys[name], saved["x"], weight)
        if dx is None:
            dx = part
        else:
            dx += part
    return dx, grads


def _out_of(a, w, batch):
    return linear_forward(a, w)


def _out_of_backward(dy, saved, w, batch):
    return linear_backward(dy, saved, w)


INTO, OUT_OF = Pair(_into, _into_backward), Pair(_out_of, _out_of_backward)
