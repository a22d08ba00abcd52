"""Which tokens of a row a context-parallel rank holds, and in which order.

A causal token sees what came before it, so the rank with a row's end has most to do.  Two orders share the work out evenly:

    contiguous  one run of tokens a rank: what a scan and a conv want
    zigzag      2c runs, of which rank i holds i and 2c-1-i, an early and a late one (Megatron-LM's context parallelism)
    striped     every c-th token from i on (Brandon et al. 2023, "Striped Attention")

Nothing else depends on the order: masks and angles are functions of the batch's arrays, which come in the same order.
"""
from __future__ import annotations

import numpy as np

from refpar.config import Layout, Model, share
from refpar.corpus import Batch


def contiguous(length: int, ranks: int, rank: int) -> np.ndarray:
    """One run of neighbours."""
    return np.arange(*share(length, ranks, rank).indices(length), dtype=np.int64)


def zigzag(length: int, ranks: int, rank: int) -> np.ndarray:
    """Run `rank` from the front, then run `rank` from the back."""
    return np.concatenate([contiguous(length, 2 * ranks, run) for run in (rank, 2 * ranks - 1 - rank)])


def striped(length: int, ranks: int, rank: int) -> np.ndarray:
    """Dealt out in turn."""
    return np.arange(rank, length, ranks, dtype=np.int64)


# The options of attention over cp, and the order of each.
ORDERS = {"contiguous": contiguous, "ring": contiguous, "zigzag": zigzag, "striped": striped, "gather": contiguous,
          "ulysses": contiguous, "ulysses+ring": contiguous}


def columns(way: str, length: int, ranks: int, rank: int) -> np.ndarray:
    """The columns of a row of `length` tokens that this rank of `ranks` holds, in its order: int64, maybe none."""
    if way not in ORDERS:
        raise ValueError(f"order: {way!r} must be one of {', '.join(ORDERS)}")
    return ORDERS[way](length, ranks, rank)


def way_of(config: Model, layout: Layout) -> str:
    """The order of the residual stream: attention's where there is any, else contiguous, as conv and scan want it."""
    return layout.cp_attention if "attention" in config.pattern else "contiguous"


def together(whole: Batch, way: str, ranks: int, some) -> Batch:
    """The part of a batch of whole rows that some of so many cp ranks hold, one rank after the other.  It keeps the whole: from it
    anybody knows where the tokens of every other rank stand."""
    held = np.concatenate([columns(way, whole.tokens.shape[1], ranks, rank) for rank in some])
    return whole.cut(columns=held)._replace(whole=whole)


def part_of(batch: Batch, way: str, cp) -> Batch:
    """This cp rank's part of a batch of whole rows."""
    return together(batch, way, cp.size, [cp.index])


def sliced(batch: Batch, slices: int, way: str, cp) -> list[Batch]:
    """This cp rank's parts of all slices of the whole rows, from the first: rows are cut into slices first, and each of these over cp."""
    whole, parts = whole_of(batch), []
    for number in range(slices):
        columns = share(whole.tokens.shape[1], slices, number)
        before = parts[-1].whole if parts else None
        parts.append(part_of(whole.cut(columns=columns)._replace(whole=whole, before=before), way, cp))
    return parts


def so_far(batch: Batch) -> list[Batch]:
    """The slices of whole rows, from the first to the one that a batch is a part of."""
    whole = whole_of(batch)
    return [whole] if whole.before is None else [*so_far(whole._replace(whole=whole.before)), whole]


def whole_of(batch: Batch) -> Batch:
    """The whole rows that a batch is a part of; ValueError if it knows none."""
    if batch.whole is None:
        raise ValueError("context parallelism: the batch must be a part of whole rows and know them, as order.part_of makes it")
    return batch.whole
