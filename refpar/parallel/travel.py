"""Arrays that travel round a ring of ranks: each to everybody, and what everybody made of it back home.

c ranks, and x_j the array that rank j starts with.  Every hop goes to the right neighbour; it is posted before the rank begins to
work on what it has, so that the work hides the hop (Liu et al. 2023, "Ring Attention with Blockwise Transformers").  A rank holds
two arrays at a time, the one at work and the one that arrives.

Where ranks stand on nodes, the ring has two levels (Gu et al. 2024, "LoongTrain", section 4.3): an array goes round its node, and
only then, one hop for all that time, to the same place of the next node.  It is the same ring twice, one inside the other.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar import watch


def travel(x, axis, shapes):
    """(owner, its x) for each rank of the axis, mine first, then my left neighbour's, and so on.  shapes: of every rank's x.

    Messages c-1; elements of every x but the right neighbour's; time (c-1) (alpha + n beta), less the work that hides it.
    """
    left, right = (axis.index - 1) % axis.size, (axis.index + 1) % axis.size
    x = np.asarray(x, order="C")
    for hop in range(axis.size):
        owner = (axis.index - hop) % axis.size
        received, moving = [x][:hop], []                            # at hop 0 it is mine
        if hop + 1 < axis.size:
            received.append(np.empty(shapes[(owner - 1) % axis.size], x.dtype))
            with watch.calling(axis, "travel"):
                moving = [axis.irecv(received[-1], left), axis.isend(x, right)]
        watch.held("received", received)
        yield owner, x
        for request in moving:
            request.wait()
        x = received[-1] if moving else x


def round_trip(x, axis, shapes, visit: Callable, homeward, join: Callable = np.add):
    """Every rank's x visits all ranks, and what each makes of it, `visit(owner, x)`, is joined on the way home.

    The owner's own share never leaves it; the sum of the others' starts at its right neighbour and follows x round the ring, one
    visit behind.  homeward: the shapes of what comes home to each rank.  Returns what came home, with the own share.
    Messages 2(c-1); elements those of `travel`, and of all that is on its way to other owners.
    """
    left, right = (axis.index - 1) % axis.size, (axis.index + 1) % axis.size
    mine, coming, going = None, [], []
    for owner, here in travel(x, axis, shapes):
        expected = []
        if owner != axis.index:
            more = np.empty(homeward[(owner - 1) % axis.size], here.dtype)
            with watch.errand(axis.name, "round_trip"):
                expected = [(axis.irecv(more, left), more)]         # what my left neighbour sends on after this visit
        share = _joined(visit(owner, here), coming, join)
        for request in going:
            request.wait()
        if owner == axis.index:
            mine = share
        else:
            with watch.errand(axis.name, "round_trip"):
                going = [axis.isend(np.asarray(share, order="C"), right)]
        coming = expected
    for request in going:
        request.wait()
    return _joined(mine, coming, join)


def _joined(share, coming, join):
    """The share, after what comes from the left, if anything does."""
    for request, before in coming:
        request.wait()
        share = join(before, share)
    return share


class Rings(NamedTuple):
    """A ring of two levels: my node's ranks, and those at my place of every node.  `nodes[i][j]` is the index, on the axis that was
    cut, of the rank at place j of node i."""
    inner: object
    outer: object
    nodes: list[list[int]]

    def at(self, of_ranks) -> list:
        """[node] of those at my place, of a list with something for every rank."""
        return [of_ranks[node[self.inner.index]] for node in self.nodes]

    def on(self, node: int, of_ranks) -> list:
        """[place] of those on a node."""
        return [of_ranks[rank] for rank in self.nodes[node]]

    def travel(self, x, shapes):
        """As `travel`: (owner, its x) for every rank, those who started on my node first."""
        for node, first in travel(x, self.outer, self.at(shapes)):
            for place, here in travel(first, self.inner, self.on(node, shapes)):
                yield self.nodes[node][place], here

    def round_trip(self, x, shapes, visit, homeward, join=np.add):
        """As `round_trip`: what a node made of x is joined on the node before it leaves for home."""
        def on_node(node, first):
            return round_trip(first, self.inner, self.on(node, shapes), lambda place, here: visit(self.nodes[node][place], here),
                              self.on(node, homeward), join)
        return round_trip(x, self.outer, self.at(shapes), on_node, self.at(homeward), join)


def rings(axis) -> Rings:
    """The levels of an axis: its nodes, where all have as many of its ranks; else (or where all are on one) a single ring."""
    nodes = axis.nodes()
    if len({len(node) for node in nodes}) != 1:
        nodes = [list(range(axis.size))]
    mine = next(node for node in nodes if axis.index in node)
    return Rings(axis.among(mine), axis.among(node[mine.index(axis.index)] for node in nodes), nodes)
