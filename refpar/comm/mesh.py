"""The mesh: ranks in a grid, and the groups of them that talk to each other.

A layout says how many ranks stand on each axis and which axis is outermost.  Ranks are numbered like the elements of an array:
the innermost axis counts fastest.  In the survey's order dp, pp, cp, tp (section 4.2, figures 4 and 5) a tensor-parallel group is
therefore a run of neighbours, who talk most, and data-parallel partners lie farthest apart.

A **group** on an axis is the ranks that differ in that coordinate alone.  Some values are summed over several axes at once (the
count of targets over dp and cp): those ranks form a group too, and the axis is called "dp+cp".  (The survey lists for dp and pp
the members of one replica or stage; those are not the groups that communicate, which are listed here.)
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from refpar import watch
from refpar.sanitizer.calls import Call
from refpar.config import Layout


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank stands: axis -> index, the outermost axis first."""
    indices = np.unravel_index(rank, _shape(layout))
    return {axis: int(index) for axis, index in zip(layout.order, indices)}


def rank_at(layout: Layout, where: dict[str, int]) -> int:
    """The rank that stands there; `where` names all four axes."""
    return int(np.ravel_multi_index([where[axis] for axis in layout.order], _shape(layout)))


def groups(layout: Layout, *axes: str) -> list[list[int]]:
    """All groups of ranks on an axis, or on several together; within a group the outermost axis counts slowest.

    With no axis at all, every rank is a group of its own.
    """
    _check(layout, axes)
    inside = [place for place, axis in enumerate(layout.order) if axis in axes]
    outside = [place for place, axis in enumerate(layout.order) if axis not in axes]
    size = math.prod(getattr(layout, axis) for axis in axes)
    grid = np.arange(layout.ranks).reshape(_shape(layout))                              # [outermost, ..., innermost]
    return grid.transpose(outside + inside).reshape(layout.ranks // size, size).tolist()


def nodes(ranks, node: int | None) -> list[list[int]]:
    """Those of `ranks` that stand on each node, by their place in the list; a node is `node` ranks in a row, or all where None."""
    found: dict[int, list[int]] = {}
    for index, rank in enumerate(ranks):
        found.setdefault(rank // node if node else 0, []).append(index)
    return list(found.values())


@dataclass(frozen=True)
class Axis:
    """One rank's group on an axis, as that rank sees it: it is `ranks[index]`, and it names the others by their index too.

    node: so many ranks, numbered in a row, stand on one node; None: all of the world do.
    """
    name: str
    ranks: tuple[int, ...]      # of the world
    index: int
    wire: Any
    node: int | None = None

    @classmethod
    def world(cls, wire) -> Axis:
        """All ranks, as one axis."""
        return cls("world", tuple(range(wire.size)), wire.rank, wire)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def among(self, indices) -> Axis:
        """Those of the group's ranks, this one among them, as a group of its own."""
        indices = list(indices)
        return Axis(self.name, tuple(self.ranks[index] for index in indices), indices.index(self.index), self.wire, self.node)

    def nodes(self) -> list[list[int]]:
        """The indices of the ranks that stand on each node."""
        return nodes(self.ranks, self.node)

    def began(self, operation: str, x, options: dict) -> Call:
        """This rank calls a collective here, with these options: the wire is told."""
        return self.wire.began(operation, x, self, options)

    def isend(self, array, to: int, tag: int = 0):
        """Start to send; the array must not change before the request's wait()."""
        with watch.errand(self.name):
            return self.wire.isend(array, self.ranks[to], tag)

    def irecv(self, out, source: int, tag: int = 0):
        """Start to receive into `out`; it must not be read before the request's wait()."""
        with watch.errand(self.name):
            return self.wire.irecv(out, self.ranks[source], tag)

    def send(self, array, to: int):
        """Send, and return when `array` may change."""
        with watch.errand(self.name):
            self.wire.send(array, self.ranks[to])

    def recv(self, out, source: int):
        """Receive into `out`."""
        with watch.errand(self.name):
            self.wire.recv(out, self.ranks[source])


class Mesh:
    """A layout laid over the world, as one rank sees it.  ValueError if the layout and the world differ in size.

    node: ranks of one node, None for all (see Axis).
    """

    def __init__(self, layout: Layout, wire, node: int | None = None):
        if layout.ranks != wire.size:
            raise ValueError(f"mesh: {layout} needs {layout.ranks} ranks, and this world has {wire.size}")
        if node is not None and node < 1:
            raise ValueError(f"mesh: a node must have at least 1 rank, not {node}")
        self.layout, self.wire, self.node = layout, wire, node or layout.node or None

    def axis(self, *axes: str, **only) -> Axis:
        """This rank's group on an axis, or on several together (dp and cp: "dp+cp", or "dp" where cp has size 1).

        only: further axes, and of each the indices on it, this rank's among them, that belong to the group (tp=range(2, 4)).
        """
        axes += tuple(axis for axis in only if axis not in axes)
        mine = next(group for group in groups(self.layout, *axes) if self.wire.rank in group)
        mine = [rank for rank in mine if all(self.coordinates(rank)[axis] in indices for axis, indices in only.items())]
        long = [axis for axis in self.layout.order if axis in axes and len(only.get(axis, range(getattr(self.layout, axis)))) > 1]
        name = "+".join(long or axes[:1])
        return Axis(name, tuple(mine), mine.index(self.wire.rank), self.wire, self.node)

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Where a rank stands, this one by default."""
        return coordinates(self.layout, self.wire.rank if rank is None else rank)

    def rank(self, where: dict[str, int]) -> int:
        """The rank that stands there; axes left out are where this rank stands."""
        return rank_at(self.layout, self.coordinates() | where)


def _shape(layout: Layout) -> list[int]:
    return [getattr(layout, axis) for axis in layout.order]


def _check(layout: Layout, axes: tuple[str, ...]):
    for axis in axes:
        if axis not in layout.order:
            raise ValueError(f"mesh: {axis!r} is no axis; the axes are {', '.join(layout.order)}")
        if axes.count(axis) > 1:
            raise ValueError(f"mesh: {axis} stands twice in {'+'.join(axes)}")
