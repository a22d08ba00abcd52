"""Stages of a pipeline: which rank holds which layers.

The embedding belongs to the first stage, the last norm and the head to the last; the layers between are cut in one run for each stage,
of equal number or of equal cost.  A stage may be left without layers: it passes on what it gets.

A parameter may be held by several stages: the table that first and last stage share (tied embeddings), and every parameter of a model
that has a copy for each direction (DualPipe).  `holders` says so, and gradients are summed over them (`parallel/placement.py`).
"""
from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

from refpar.nn.chain import Chain


def cuts(costs: list[float], stages: int) -> list[slice]:
    """Cut layers of these costs in runs: run i ends with the last layer that begins before (i+1)/stages of the whole cost is spent.

    Of equal costs that is `share`: layers*i//stages to layers*(i+1)//stages.
    """
    spent = list(accumulate(costs))
    whole = spent[len(spent) - 1] if spent else 0
    edges = [bisect_right(spent, whole * stage / stages * (1 + 1e-12)) for stage in range(stages)] + [len(costs)]
    return [slice(first, last) for first, last in zip(edges, edges[1:])]


def matrix_sizes(chain: Chain) -> dict[str, int]:
    """Layer -> numbers in its matrices: a token costs two FLOPs for each, forward."""
    return {name: sum(math.prod(chain.model.shape(dims)) for dims in layer.dims.values() if len(dims.split()) > 1)
            for name, layer in chain.layers}


def stage_layers(chain: Chain, stages: int, by_cost: bool = False) -> list[slice]:
    """The layers of each stage, as slices of `chain.layers`."""
    between = [name for name, _ in chain.layers][1:-2]
    sizes = matrix_sizes(chain)
    inner = cuts([sizes[name] if by_cost else 1 for name in between], stages)
    edges = [0] + [1 + part.start for part in inner[1:]] + [len(chain.layers)]
    return [slice(first, last) for first, last in zip(edges, edges[1:])]


def stage(chain: Chain, layers: slice) -> Chain:
    """Some layers of the chain, with what they borrow."""
    held = chain.layers[layers]
    names = {name for name, _ in held}
    return chain._replace(layers=held, ties={mine: owner for mine, owner in chain.ties.items() if mine[0] in names})


def on_rank(chain: Chain, parts: list[slice], places: tuple[int, ...], rank: int) -> Chain:
    """All layers that a rank of pp holds, in the model's order.  Stage s runs part s % len(parts), on rank places[s]."""
    mine = sorted({s % len(parts) for s, place in enumerate(places) if place == rank})
    held = tuple(layer for part in mine for layer in chain.layers[parts[part]])
    names = {name for name, _ in held}
    ties = {borrower: owner for borrower, owner in chain.ties.items() if borrower[0] in names}
    return chain._replace(layers=held, ties=ties, holders=holders(chain, parts, places))


def holders(chain: Chain, parts: list[slice], places: tuple[int, ...]) -> dict[tuple[str, str], tuple[int, ...]]:
    """(layer, parameter) -> the ranks of pp that hold it."""
    of_layer = {name: {place for s, place in enumerate(places) if s % len(parts) == part}
                for part, layers in enumerate(parts) for name, _ in chain.layers[layers]}
    found = {(layer, p): set(of_layer[layer]) for layer, group in chain.dims().items() for p in group}
    for (layer, _), owner in chain.ties.items():
        found[owner] |= of_layer[layer]
    return {parameter: tuple(sorted(ranks)) for parameter, ranks in found.items()}
