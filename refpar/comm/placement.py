"""Placements: where a value lies on an axis, and where its gradient then lies.

    Shard(dim)   each rank holds a part of it along a dim; parts may be uneven, or empty
    Partial      each rank holds an addend; the value is their sum
    Replicate    each rank holds all of it, and does something of its own with it
    Invariant    each rank holds all of it, and does the same with it as the others

The words are DTensor's, and `Invariant` is one that it lacks.  On the ranks Replicate and Invariant look alike; their gradients do
not.  Where each rank does something of its own with a value, each has an addend of the gradient: Partial.  Where all do the same,
each has the gradient already, and to sum it would count it `axis.size` times.

A communication changes the placement of a value and leaves the value as it is.
"""
from __future__ import annotations

from typing import NamedTuple



class Placement(NamedTuple):
    """One of the four kinds; `dim` is the Shard's."""
    kind: str
    dim: int | None = None

    def __repr__(self) -> str:
        return self.kind if self.dim is None else f"{self.kind}({self.dim})"


def Shard(dim: int) -> Placement:
    """Cut along `dim`."""
    return Placement("Shard", dim)


Partial, Replicate, Invariant = Placement("Partial"), Placement("Replicate"), Placement("Invariant")

# The gradient table (law 2): the placement of a value -> the placement of its gradient.
GRADIENT = {"Shard": "Shard", "Partial": "Replicate", "Replicate": "Partial", "Invariant": "Invariant"}


def dual(placement: Placement) -> Placement:
    """Where the gradient of a value with this placement lies."""
    return placement._replace(kind=GRADIENT[placement.kind])
