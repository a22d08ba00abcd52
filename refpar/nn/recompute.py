"""Recomputation: a layer that keeps its input alone, and runs forward again when backward needs what it did not keep.

    none        everything that backward needs is kept
    selective   all but what the core of attention makes, which costs much memory and few FLOPs (Korthikanti et al. 2022)
    full        the layer's input (Chen et al. 2016)

Nothing else changes: randomness is keyed (law 12), so the second forward drops what the first dropped, and messages that stand
between the layer's seams are sent again.  What lies before the tokens is kept as it was given.
"""
from __future__ import annotations

from refpar.nn.seams import Layer, Pair


def recomputed(layer: Layer) -> Layer:
    """The layer, of which nothing is kept but its input and what lies before."""
    def forward(x, w, batch, before):
        y, after, _ = layer.forward(x, w, batch, before)
        return y, after, {"x": x, "before": before}

    def backward(dy, dafter, saved, w, batch):
        _, _, kept = layer.forward(saved["x"], w, batch, saved["before"])
        return layer.backward(dy, dafter, kept, w, batch)

    return layer._replace(forward=forward, backward=backward)


def recomputed_core(core: Pair) -> Pair:
    """The same of a core, whose inputs are q, k and v."""
    def forward(q, k, v, batch, before):
        out, after, _ = core.forward(q, k, v, batch, before)
        return out, after, {"q": q, "k": k, "v": v, "before": before}

    def backward(dout, dafter, saved, batch):
        _, _, kept = core.forward(saved["q"], saved["k"], saved["v"], batch, saved["before"])
        return core.backward(dout, dafter, kept, batch)

    return Pair(forward, backward)
