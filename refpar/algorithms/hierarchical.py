"""Inside a node first, then across: the slow links between nodes carry only what must cross them.

Idea: G ranks of a node reduce_scatter among themselves, so each holds 1/G of the node's sum; rank j of every node meets rank j of
the others, and they all_reduce their share; all_gather inside the node.  A node's links to the others carry its sum once, not G
times, and all G ranks of a node use them at once.  Where nodes hold unequal numbers of the axis's ranks, the smallest says how many
shares there are, and the other ranks of a node keep none.

Source: Jia et al., "Highly scalable deep learning training system with mixed-precision" (2018), section 3.3; Horovod's and NCCL's
hierarchical all_reduce.
"""
from __future__ import annotations

import numpy as np

from refpar import watch
from refpar.comm import ring
from refpar.comm.rounding import rounded_once
from refpar.comm.shards import slices
from refpar.config import shares


@rounded_once
def all_reduce(x, axis, op=np.add):
    """The sum of every rank's x, on all ranks; `axis.nodes()` says who stands with whom.

    M nodes of G ranks: messages 2(G-1) inside and 2(M-1) across; elements 2(G-1)/G T and 2(M-1)/M T/G;
    time 2(G-1) alpha + 2(G-1)/G n beta inside, and 2(M-1) alpha' + 2(M-1)/M n/G beta' across.
    """
    nodes = axis.nodes()
    node = next(node for node in nodes if axis.index in node)
    inside, lengths = axis.among(node), share_lengths(x.size, nodes, node)
    parts = slices(lengths)
    part = ring.reduce_scatter(x.reshape(x.size), inside, parts, op)
    if inside.index < width(nodes):
        part = ring.all_reduce(part, axis.among([other[inside.index] for other in nodes]), op)
    total = np.empty(x.size, x.dtype)
    watch.held("received", total)
    total[parts[inside.index]] = part
    ring.all_gather(total, inside, parts)
    return total.reshape(x.shape)


def width(nodes: list[list[int]]) -> int:
    """In how many shares the array goes across: as many as the smallest node has ranks."""
    return min(map(len, nodes))


def share_lengths(count: int, nodes: list[list[int]], node: list[int]) -> list[int]:
    """Elements of the share of each rank of a node."""
    return shares(count, width(nodes)) + [0] * (len(node) - width(nodes))
