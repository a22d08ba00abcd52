"""Mamba over cp: an option of the layout, as fillings of a layer's seams and the order in which it runs.

    gather, chain, scan     conv and scan hand on summaries (`parallel/state.py`); each rank has one run of the tokens
    heads                   tokens become heads and come back (`parallel/heads.py`); Mamba-1's conv hands on its tail, by gather

Where the stream has another order, that of attention, a layer that wants runs of tokens is led to it and back.
"""
from __future__ import annotations

from refpar.config import Model
from refpar.nn.seams import Layer, Pair
from refpar.parallel.heads import by_channels, by_heads
from refpar.parallel.order import ORDERS, contiguous, part_of
from refpar.parallel.reorder import order, ordered
from refpar.parallel.state import CARRIES, gather


def mamba_seams(config: Model, kind: str, cp, option: str, way: str) -> dict[str, Pair]:
    """Fields of `Seams` for a layer of the kind mamba1 or mamba2; way: the order of the stream."""
    if option != "heads":
        return {"carry": CARRIES[option](cp)}
    mixed = {"mix": by_heads(config, cp, way)} if kind == "mamba2" else {"scan": by_channels(config, cp)}
    return {"carry": gather(cp)} | mixed


def reorders(kind: str, option: str, way: str) -> bool:
    """Must such a layer be led to another order?  By heads, Mamba-2 takes the stream as it is."""
    return ORDERS[way] is not contiguous and (kind, option) != ("mamba2", "heads")


def in_runs(layer: Layer, cp, way: str) -> Layer:
    """The layer in the contiguous order, of a stream in another."""
    return ordered(layer, order(cp, way, "contiguous"), lambda batch: part_of(batch.whole, "contiguous", cp))
