"""The chain: a model is a list of (name, layer), and this is the only loop over it.

Forward goes down the list, backward comes up; what lies before a layer's tokens (`before`), what they leave behind (`after`) and
what backward needs (`saved`) are dicts with the layers' names.  A pipeline stage is a slice of the list.
"""
from __future__ import annotations

from typing import NamedTuple

from refpar import watch
from refpar.config import Model
from refpar.nn.loss import cross_entropy
from refpar.nn.product import settle
from refpar.nn.seams import Layer, Pair


class Chain(NamedTuple):
    """A model of the sizes `model`, or a stage of it.

    `ties` says which parameters a layer borrows: (layer, parameter) -> (owner, parameter).
    `loss` is what is minimised: forward(logits, targets) -> (sum, count), saved; backward(scale, saved) -> dlogits.
    `holders` says of the parameters of a stage which indices of pp hold them, where that is not every one."""
    layers: tuple[tuple[str, Layer], ...]
    ties: dict[tuple[str, str], tuple[str, str]] = {}
    loss: Pair = cross_entropy()
    model: Model = Model()
    holders: dict[tuple[str, str], tuple[int, ...]] = {}

    def weights(self, params: dict, name: str) -> dict:
        """A layer's own parameters and those that it borrows."""
        borrowed = {mine: params[owner][theirs] for (layer, mine), (owner, theirs) in self.ties.items() if layer == name}
        return params.get(name, {}) | borrowed

    def dims(self) -> dict[str, dict[str, str]]:
        """Layer -> parameter -> dims, of every parameter once: a tied one at its owner, also where that is another stage's layer."""
        found: dict = {owner: {theirs: dict(self.layers)[layer].dims[mine]} for (layer, mine), (owner, theirs) in self.ties.items()}
        for name, layer in self.layers:
            found[name] = {p: dims for p, dims in layer.dims.items() if (name, p) not in self.ties}
        return found


def start(chain: Chain, params: dict, batch) -> dict:
    """Nothing before the first token, for each layer in its own terms."""
    return {name: layer.start(chain.weights(params, name), batch) for name, layer in chain.layers}


def forward(chain: Chain, x, params: dict, batch, before: dict):
    """x (the tokens, or the hidden states of a stage before) -> y, after, saved."""
    after, saved = {}, {}
    for name, layer in chain.layers:
        x, after[name], saved[name] = layer.forward(x, chain.weights(params, name), batch, before[name])
        watch.value(name, x)
    return x, after, saved


def backward(chain: Chain, dy, saved: dict, params: dict, batch, dafter: dict):
    """dy -> dx, dbefore, grads; weight gradients are still products (see `gradients`)."""
    dbefore, grads = {}, {}
    for name, layer in reversed(chain.layers):
        dy, dbefore[name], grads[name] = layer.backward(dy, dafter[name], saved[name], chain.weights(params, name), batch)
        watch.value(f"d {name}", dy)
    return dy, dbefore, grads


def gradients(chain: Chain, products: dict) -> dict:
    """Multiply the products out, and add the gradient of each borrowed parameter to its owner's."""
    grads = settle(products)
    for (layer, mine), (owner, theirs) in chain.ties.items():
        mine_too, at_owner = grads[layer].pop(mine), grads.setdefault(owner, {})
        at_owner[theirs] = at_owner[theirs] + mine_too if theirs in at_owner else mine_too
    return grads
