"""Loss and gradients of one batch in one process: down the chain once, and up once."""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.nn.chain import Chain, backward, forward, gradients, start


def zeros_like(tree):
    """A nest of zeros shaped like `tree`; what is not a float array (positions, None) stays as it is."""
    if isinstance(tree, dict):
        return {name: zeros_like(branch) for name, branch in tree.items()}
    if isinstance(tree, np.ndarray) and tree.dtype.kind == "f":
        return np.zeros_like(tree)
    return tree


def add(a, b):
    """The sum of two nests of arrays of the same names."""
    if isinstance(a, dict):
        return {name: add(a[name], b[name]) for name in a}
    return a + b


def loss_and_gradients(chain: Chain, params: dict, batch, count: int):
    """(summed loss, gradients of summed loss / count).

    `count` is the number of targets of the whole step, over all ranks and micro-batches (law 3): backward starts once, from
    1/count, and whatever is added to these gradients later is only ever added.  A step without a target has zero gradients.
    """
    logits, after, saved = forward(chain, batch.tokens, params, batch, start(chain, params, batch))      # [B, S, V/tp]
    (loss, _), kept = chain.loss.forward(logits, batch.targets)
    watch.held("saved", [saved, kept])
    watch.value("batch", batch)
    dlogits = chain.loss.backward(1.0 / max(count, 1), kept)                                             # [B, S, V/tp]
    _, _, products = backward(chain, dlogits, saved, params, batch, zeros_like(after))
    watch.held("products", products)
    return loss, gradients(chain, products)


def loss_of(chain: Chain, params: dict, batch) -> tuple[float, int]:
    """(summed loss, number of targets), forward only."""
    logits, _, _ = forward(chain, batch.tokens, params, batch, start(chain, params, batch))              # [B, S, V/tp]
    (loss, count), _ = chain.loss.forward(logits, batch.targets)
    return loss, count
