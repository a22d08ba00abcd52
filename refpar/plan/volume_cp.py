"""What attention over context-parallel ranks sends: formulas for one rank, forward and backward, exact for any sizes.

They are those told in `parallel/context.py` and `parallel/ulysses.py`, made of those of `plan/volume.py`: to travel round a ring is
what an all_gather does, to come home a reduce_scatter.  The survey's table 3 has 4 (c-1)/c B S K E for the forward of a ring: half
of it is sent, half received, of K and V each; backward it leaves out.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar.comm import mesh
from refpar.comm.choose import Task
from refpar.parallel.order import columns
from refpar.parallel.ulysses import group_size, head_parts
from refpar.plan import volume
from refpar.plan.promise import promised
from refpar.plan.volume import Volume


class Cut(NamedTuple):
    """Rows, cut over cp: sizes of the whole, and how."""
    ranks: int
    way: str                # the option
    rows: int
    length: int
    heads: int
    kv_heads: int
    width: int
    itemsize: int = 8
    node: int | None = None
    moved: str = "kv"
    places: tuple[int, ...] = ()        # of the cp ranks in the world; none: as they are numbered
    earlier: tuple[int, ...] = ()       # lengths of the slices of whole rows that lie before, and whose keys travel too

    def nodes(self, indices) -> list[list[int]]:
        """Those of the ranks, by their place among `indices`, that stand on each node."""
        return mesh.nodes([self.places[index] for index in indices] if self.places else indices, self.node)

    @property
    def tokens(self) -> list[int]:
        """B S_j of each rank."""
        return self._held([self.length])

    @property
    def keys(self) -> list[int]:
        """B (S_j + R_j): those whose keys it has."""
        return self._held([*self.earlier, self.length])

    def _held(self, slices) -> list[int]:
        return [self.rows * sum(len(columns(self.way, length, self.ranks, rank)) for length in slices) for rank in range(self.ranks)]


def context_volume(i: int, cut: Cut) -> tuple[Volume, Volume]:
    """(forward, backward): messages and BYTES that rank i sends and receives."""
    return tuple(one.times(cut.itemsize) for one in _FORMULAS.get(cut.way, _ring)(i, cut))


def two_levels(formula: Callable, i: int, sizes, nodes) -> Volume:
    """A ring of nodes, and for each of them a ring on mine; the formula is that of one ring."""
    if len({len(node) for node in nodes}) != 1:
        nodes = [list(range(len(sizes)))]
    mine, place = next((number, node.index(i)) for number, node in enumerate(nodes) if i in node)
    total = formula(mine, [sizes[node[place]] for node in nodes])
    for node in nodes:
        total += formula(place, [sizes[rank] for rank in node])
    return total


def _around(i: int, out, home, nodes) -> Volume:
    """Arrays of the sizes `out` travel, and of the sizes `home` come home."""
    return two_levels(volume.all_gather, i, out, nodes) + two_levels(volume.reduce_scatter, i, home, nodes)


def _ring(i: int, cut: Cut):
    nodes = cut.nodes(range(cut.ranks))
    if cut.moved == "q":
        def queries(width):
            return [tokens * cut.heads * width for tokens in cut.tokens]
        width = cut.width
        return (_around(i, queries(width), queries(width + 1), nodes), _around(i, queries(2 * width + 2), queries(width), nodes))
    keys = [tokens * 2 * cut.kv_heads * cut.width for tokens in cut.keys]
    return two_levels(volume.all_gather, i, keys, nodes), _around(i, keys, keys, nodes)


def _gather(i: int, cut: Cut):
    task = Task([tokens * 2 * cut.kv_heads * cut.width for tokens in cut.keys], np.dtype(f"f{cut.itemsize}"),
                cut.nodes(range(cut.ranks)))
    there, home = (promised(operation, None, i, task) for operation in ("all_gather", "reduce_scatter"))
    return tuple(Volume(one.messages, one.elements // cut.itemsize, one.messages_received, one.elements_received // cut.itemsize)
                 for one in (there, there + home))


def _by_heads(i: int, cut: Cut):
    size = cut.ranks if cut.way == "ulysses" else group_size(cut.ranks, cut.kv_heads)
    first, place = i // size * size, i % size
    tokens = cut.tokens[first:first + size]
    counts = [[(part.stop - part.start) * cut.width for part in parts] for parts in head_parts(cut.heads, cut.kv_heads, size)]
    many, few = [q + 2 * k for q, k in counts], [q for q, _ in counts]

    def there(per_token):
        return _exchanged(place, [[mine * theirs for theirs in per_token] for mine in tokens])

    def back(per_token):
        return _exchanged(place, [[mine * theirs for theirs in tokens] for mine in per_token])
    _, keys = counts[place]
    joint = [sum(cut.tokens[at:at + size]) * 2 * keys for at in range(0, cut.ranks, size)]
    circle = cut.nodes(range(place, cut.ranks, size))
    forward = there(many) + two_levels(volume.all_gather, i // size, joint, circle) + back(few)
    return forward, there(few) + _around(i // size, joint, joint, circle) + back(many)


def _exchanged(i: int, blocks) -> Volume:
    """Every block [i][j] goes from i to j."""
    others = [j for j in range(len(blocks)) if j != i]
    return Volume(len(others), sum(blocks[i][j] for j in others), len(others), sum(blocks[j][i] for j in others))


_FORMULAS = {"gather": _gather, "ulysses": _by_heads, "ulysses+ring": _by_heads}
