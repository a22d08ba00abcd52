"""What each layer leaves between B and W: two operands of every linear map, and the gradients that B has made itself.

A map y = x w leaves x and dy, of which W makes its gradient x' dy (`nn/product.py`); maps of one x keep it once.  All other parameters
(norms, biases, convs, a table of words) have their gradients when B ends, each as large as the parameter.  Whatever else F kept is let
go by B, so nothing here depends on what is computed again: an x that was made anew is as large as one that was kept.

Shapes are in the words of `activations.py`.
"""
from __future__ import annotations

from functools import cache

from refpar.config import Layout, Model
from refpar.nn.build import build
from refpar.plan.activations import Spot, elements

# The linear maps of a layer, those of one x together; a model has some of them.
MAPS = {"attention": ("q k v", "o"), "mlp": ("gate_up up", "down"), "mamba1": ("x z", "dt_low B C", "dt", "out"),
        "mamba2": ("z x B C dt", "out"), "head": ("head table",)}


def longer(model: Model, layout: Layout, kind: str) -> dict[str, str]:
    """The maps whose dy is a view of a longer array, which is kept whole: of all keys, or of the inputs that a conv has before."""
    if kind == "attention":
        return dict.fromkeys("v" if model.positions == "rope" or model.qk_norm else "kv", "S+R")
    if kind == "mamba2" and layout.cp_mamba == "heads":
        return {}
    return dict.fromkeys({"mamba1": "x", "mamba2": "xBC"}.get(kind, ""), "S+W-1")


@cache
def left(model: Model, kind: str, layout: Layout = Layout()) -> tuple[str, ...]:
    """The shapes of all that B leaves for W in a layer of this kind."""
    dims = next((dict(layer.dims) for name, layer in build(model).layers if name.partition(".")[2] == kind), {})
    shapes, length = list[str](), longer(model, layout, kind)
    for names in MAPS.get(kind, ()):
        maps = {name: dims.pop(name).split() for name in names.split() if name in dims}     # of each w: [n,] J, O
        shapes += {f"B S {width}" for *_, width, _ in maps.values()}                        # x
        shapes += [" ".join((*stack, "B", length.get(name, "S"), width)) for name, (*stack, _, width) in maps.items()]      # dy
    return *shapes, *dims.values()


def left_elements(spot: Spot, kind: str) -> int:
    """Elements that one layer leaves for W on a rank, of one micro-batch."""
    return sum(elements(spot, kind, shape) for shape in left(spot.model, kind, spot.layout))
