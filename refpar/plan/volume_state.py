"""What a Mamba layer over context-parallel ranks sends: formulas for one rank, forward and backward, exact for any sizes.

They are those told in `parallel/state.py`, `parallel/heads.py` and `parallel/reorder.py`.  The survey's table 3 has an
all_gather of the state for cp, of cost O(D N c); refpar's own is c-1 summaries of B M (1 + P N) numbers, decay and state, and the
conv's tails, of which the survey says nothing.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar.comm import mesh
from refpar.comm.choose import Task
from refpar.config import Model, share, shares
from refpar.parallel.heads import cuts_of
from refpar.parallel.mamba import reorders
from refpar.parallel.order import columns
from refpar.plan.promise import promised
from refpar.plan.volume import NOTHING, Volume

COUNT = 8               # bytes of a number of tokens


class StateCut(NamedTuple):
    """Rows of one layer, cut over cp: sizes of the whole, and how."""
    model: Model
    kind: str
    option: str
    way: str                # the order of the stream
    ranks: int
    rows: int
    length: int
    itemsize: int = 8
    node: int | None = None
    tp: tuple[int, int] = (1, 0)        # ranks, and which: of a layer that is cut over tp, the sizes are those of a rank
    places: tuple[int, ...] = ()        # of the cp ranks in the world; none: as they are numbered

    def nodes(self, indices) -> list[list[int]]:
        """Those of the ranks, by their place among `indices`, that stand on each node."""
        return mesh.nodes([self.places[index] for index in indices] if self.places else indices, self.node)

    def size(self, words: str) -> int:
        """Of a dim, on this rank of tp."""
        part = self.model.part(words, *self.tp)
        return part.stop - part.start

    def held(self, way: str) -> list[np.ndarray]:
        """The columns of each rank."""
        return [columns(way, self.length, self.ranks, rank) for rank in range(self.ranks)]


def state_volume(i: int, cut: StateCut) -> tuple[Volume, Volume]:
    """(forward, backward): messages and BYTES that rank i sends and receives."""
    led = reorders(cut.kind, cut.option, cut.way)
    moved = reorder_volume(i, cut).times(cut.itemsize) if led else NOTHING
    ways = zip(_by_heads(i, cut), _carried(i, cut))
    return tuple(heads + carried + moved for heads, carried in ways)


# ---------------------------------------------------------------------------------------------------- summaries, handed on

def summaries(cut: StateCut) -> list[int]:
    """The bytes of each summary that the layer hands on."""
    model, rows, size = cut.model, cut.rows, cut.itemsize
    channels = [cut.size(word) for word in (["I"] if cut.kind == "mamba1" else ["MP", "GN", "GN"])]
    tails = [COUNT * rows + rows * (model.conv - 1) * width * size for width in channels]
    if cut.option == "heads":
        return tails if cut.kind == "mamba1" else []
    state = 2 * model.state * cut.size("I") if cut.kind == "mamba1" else cut.size("M") * (1 + model.ssm_head_width * model.state)
    return [*tails, rows * state * size]


def _carried(i: int, cut: StateCut) -> tuple[Volume, Volume]:
    """Forward, and backward: the axis turned round."""
    def carried(place, ranks):
        nodes = cut.nodes(ranks)
        return sum((carry_volume(place, size, cut.ranks, cut.option, nodes) for size in summaries(cut)), NOTHING)
    return carried(i, range(cut.ranks)), carried(cut.ranks - 1 - i, range(cut.ranks)[::-1])


def carry_volume(i: int, size: int, c: int, option: str, nodes) -> Volume:
    """Messages and bytes of rank i of c, for one summary of `size` bytes."""
    if option in ("gather", "heads"):
        return promised("all_gather", None, i, Task([size] * c, np.dtype(np.uint8), nodes))
    sends, receives = {"chain": (int(i + 1 < c), int(i > 0)), "scan": ((c - i - 1).bit_length(), i.bit_length())}[option]
    total = promised("broadcast", None, i, Task(shares(size, c), np.dtype(np.uint8), nodes, root=c - 1))
    return Volume(sends, sends * size, receives, receives * size) + total


# ------------------------------------------------------------------------------------------------------ tokens, exchanged

def _by_heads(i: int, cut: StateCut) -> tuple[Volume, Volume]:
    """Tokens to heads and back; of Mamba-1, B and C to everybody."""
    if cut.option != "heads":
        return NOTHING, NOTHING
    way = cut.way if cut.kind == "mamba2" else "contiguous"
    tokens = [cut.rows * len(some) for some in cut.held(way)]
    shared = [mine * 2 * cut.model.state for mine in tokens] if cut.kind == "mamba1" else []
    there, back = zip(*(_widths(cut, rank) for rank in range(cut.ranks)))
    to_heads, to_tokens = (_exchanged(i, np.outer(tokens, width)) for width in (there, back))
    home, ahead = (_exchanged(i, np.outer(width, tokens)) for width in (back, there))
    nodes = cut.nodes(range(cut.ranks))
    task = Task(shared, np.dtype(f"f{cut.itemsize}"), nodes)
    gathers = [promised(operation, None, i, task) if shared else NOTHING for operation in ("all_gather", "reduce_scatter")]
    return ((to_heads + home).times(cut.itemsize) + gathers[0], (to_tokens + ahead).times(cut.itemsize) + gathers[1])


def _widths(cut: StateCut, rank: int) -> tuple[int, int]:
    """Numbers of each token that go to the heads of a rank, and come back."""
    if cut.kind == "mamba1":
        mine = share(cut.size("I"), cut.ranks, rank)
        return 2 * (mine.stop - mine.start), mine.stop - mine.start
    streams = cuts_of(cut.model, cut.size("M"), cut.size("G"), cut.ranks)[rank].streams()
    widths = [part.stop - part.start for part in streams]
    return sum(widths), widths[0]


def reorder_volume(i: int, cut: StateCut) -> Volume:
    """Messages and elements for one layer, forward, and as many backward: into the other order, and out again."""
    stream, runs = cut.held(cut.way), cut.held("contiguous")
    blocks = np.array([[len(np.intersect1d(mine, theirs)) for theirs in runs] for mine in stream]) * cut.rows * cut.model.width
    return _exchanged(i, blocks) + _exchanged(i, blocks.T)


def _exchanged(i: int, blocks) -> Volume:
    """Block [i, j] goes from i to j."""
    others = len(blocks) - 1
    return Volume(others, int(blocks[i].sum() - blocks[i, i]), others, int(blocks[:, i].sum() - blocks[i, i]))
