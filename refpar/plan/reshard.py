"""What resharding sends: a formula for one rank, from the lengths of parts alone.

On a layout a rank's part of a parameter is a range of places along the one dim that tp cuts, and all of the others.  A rank lacks
those places of its new range that are not in its old one, and each of them reaches it once, from the first rank that holds it.
"""
from __future__ import annotations

import math

import numpy as np

from refpar.comm.mesh import coordinates
from refpar.config import Model
from refpar.parallel.placement import axis_of
from refpar.parallel.reshard import Place
from refpar.plan.volume import NOTHING, Volume


def reshard(model: Model, dims: dict[str, dict[str, str]], before: Place, after: Place, rank: int) -> Volume:
    """Messages and elements of all parameters (layer -> parameter -> dims)."""
    names = [((layer, name), text) for layer, group in dims.items() for name, text in group.items()]
    return sum((of_parameter(model, name, text, before, after, rank) for name, text in names), NOTHING)


def of_parameter(model: Model, name: tuple[str, str], dims: str, before: Place, after: Place, rank: int) -> Volume:
    """The same of one."""
    word = next((word for word in dims.split() if axis_of(word)), None)
    row = math.prod(model.dim(other)[0] for other in dims.split() if other != word)     # elements at each place of the dim
    ranks = range(max(before.layout.ranks, after.layout.ranks, rank + 1))
    old, new = ([places(model, name, word, place, r) for r in ranks] for place in (before, after))

    def travel(source: int, to: int) -> int:
        """Places that go from one rank to another: `source` is the first that holds them, and `to` holds others."""
        first = old.index(old[source]) == source
        return _common(old[source], new[to]) if first and old[to] != old[source] else 0
    sent, received = [travel(rank, other) for other in ranks], [travel(other, rank) for other in ranks]
    return Volume(np.count_nonzero(sent), row * sum(sent), np.count_nonzero(received), row * sum(received))


def places(model: Model, name: tuple[str, str], word: str | None, place: Place, rank: int) -> tuple[int, int]:
    """(start, stop) of a rank's places along the dim; a dim of one place where nothing cuts the parameter."""
    if rank >= place.layout.ranks:
        return 0, 0
    where = coordinates(place.layout, rank)
    if name in place.stages and where["pp"] not in place.stages[name]:
        return 0, 0
    part = model.part(word, place.layout.tp, where["tp"]) if word else slice(0, 1)
    return part.start, part.stop


def _common(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
