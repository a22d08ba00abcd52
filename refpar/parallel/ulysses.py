"""Context parallelism by heads: some tokens with all heads become all tokens with some heads, and back (Jacobs et al. 2023,
"DeepSpeed Ulysses").

An exchange carries q, k and v there, attention runs on whole rows as if alone, another exchange carries out back.  Backward is the
same in reverse.  Heads are cut in whole groups of the query heads that share a key head.  Where there are more ranks than key
heads, the ranks are cut into a run for each, which share its query heads; its keys and values go to all of them that have any, and
the gradients from all of them are added.

Few key heads limit the ranks among which that pays.  So the ranks may stand in groups of `group` neighbours, which exchange heads,
and a ring across the groups (Fang and Zhao 2024, "USP"; Gu et al. 2024, "LoongTrain").

Elements sent by rank i of a group, where rank j has S_j tokens, and h_j query and k_j key heads after the exchange:

    forward     B E S_i sum over j != i of (h_j + 2 k_j), for q, k and v; and B E h_i sum over j != i of S_j, for out
    backward    as much, each the other way round: B E S_i sum h_j for dout; B E (h_i + 2 k_i) sum S_j for dq, dk and dv

(for even sizes: (c-1)/c B S/c (2H + 2K) E each way), and what the ring across sends, with the tokens of a group for those of a
rank.
"""
from __future__ import annotations

from itertools import accumulate
from typing import Callable

import numpy as np

from refpar.comm.collectives import exchange
from refpar.comm.shards import slices
from refpar.config import share, shares
from refpar.nn import blocks
from refpar.nn.attention import EVERYTHING, extend, share_out
from refpar.nn.seams import Pair
from refpar.parallel.context import Here, attend_backward, attend_forward, gather, ring, ring_among, standing
from refpar.parallel.order import columns, together


def head_parts(heads: int, kv_heads: int, ranks: int) -> list[tuple[slice, slice]]:
    """(query heads, key heads) of each rank: the heads go to runs of ranks or ranks to runs of heads, whichever are fewer."""
    group = heads // kv_heads
    if ranks <= kv_heads:
        own = [share(kv_heads, ranks, rank) for rank in range(ranks)]
        return [(slice(part.start * group, part.stop * group), part) for part in own]
    parts = []
    for head, run in enumerate(shares(ranks, kv_heads)):
        for place in range(run):
            mine = share(group, run, place)
            parts.append((slice(head * group + mine.start, head * group + mine.stop),
                          slice(head, head + (mine.stop > mine.start))))                # who has no query needs no key
    return parts


def group_size(ranks: int, kv_heads: int) -> int:
    """Ranks that exchange heads, the rest of the factor being the ring's: the largest divisor of `ranks` that is no more than the
    key heads, so that none is sent twice."""
    return max(size for size in range(1, ranks + 1) if ranks % size == 0 and size <= max(kv_heads, 1))


def to_heads(arrays, cuts, axis, tokens) -> list:
    """Arrays [B, S_i, heads, ...], all tokens of this rank -> [B, S', some heads, ...], all tokens of the axis.

    cuts: for each rank, the heads that it gets of each array; they may overlap, or be none.  tokens: S_j of each rank.  One
    exchange.
    """
    sent = [np.concatenate([x[:, :, part] for x, part in zip(arrays, cut)], axis=2) for cut in cuts]
    rows, _, heads, *width = sent[axis.index].shape
    arrived = exchange(sent, axis, [(rows, length, heads, *width) for length in tokens])
    return np.split(np.concatenate(arrived, axis=1), _ends(cuts[axis.index]), axis=2)


def to_tokens(arrays, cuts, axis, tokens, heads) -> list:
    """Back again, and the transpose: what several ranks have of one head is added.  heads: of each array, when it has all."""
    joint = np.concatenate(arrays, axis=2)                                              # [B, S', some heads, E]
    rows, _, _, *width = joint.shape
    shapes = [(rows, tokens[axis.index], sum(part.stop - part.start for part in cut), *width) for cut in cuts]
    arrived = exchange([joint[:, part] for part in slices(tokens)], axis, shapes)
    whole = [np.zeros((rows, tokens[axis.index], count, *width), joint.dtype) for count in heads]
    for cut, block in zip(cuts, arrived):
        for x, part, addend in zip(whole, cut, np.split(block, _ends(cut), axis=2)):
            x[:, :, part] += addend
    return whole


def _ends(cut) -> list[int]:
    """Where one array's heads end and the next one's begin, side by side."""
    return list(accumulate(part.stop - part.start for part in cut))[:len(cut) - 1]


def ulysses(cp, way: str, dropped: Callable = lambda first: None, window: int = EVERYTHING, plan=blocks.blocks,
            group: int | None = None) -> Pair:
    """The filling of `core`: exchanges among `group` neighbours (None: all of cp), a ring across the groups.

    dropped(first) -> the mask of dropout for heads that begin at `first` of this rank's (see `attention_dropout`), or None.
    """
    size = group or cp.size
    if cp.size % size:
        raise ValueError(f"ulysses: groups of {size} ranks must divide the {cp.size} ranks of cp")
    first = cp.index // size * size
    mine = range(first, first + size)
    near, across = cp.among(mine), cp.among(range(cp.index % size, cp.size, size))

    def among(parts):
        """The ring across, for my heads."""
        return ring_among(across, standing(way, cp.size, size), Here(dropped(parts[near.index][0].start), window, plan))

    def tokens(batch):
        """Of each rank of my group."""
        return [len(columns(way, batch.whole.tokens.shape[1], cp.size, rank)) for rank in mine]

    def forward(q, k, v, batch, before):
        require_first(before)
        parts, heads = head_parts(q.shape[2], k.shape[2], size), q.shape[2]
        some = to_heads([q, k, v], [(own, key, key) for own, key in parts], near, tokens(batch))
        out, saved = attend_forward(among(parts), *some, together(batch.whole, way, cp.size, mine))
        out, = to_tokens([out], [(own,) for own, _ in parts], near, tokens(batch), [heads])
        return out, extend(before, k, v, batch), saved

    def backward(dout, dafter, saved, batch):
        heads, kv_heads = dout.shape[2], dafter["k"].shape[2]
        parts = head_parts(heads, kv_heads, size)
        dout, = to_heads([dout], [(own,) for own, _ in parts], near, tokens(batch))
        some = attend_backward(among(parts), dout, saved, together(batch.whole, way, cp.size, mine))
        cuts = [(own, key, key) for own, key in parts]
        dq, dk, dv = to_tokens(some, cuts, near, tokens(batch), [heads, kv_heads, kv_heads])
        return dq, *share_out(dk, dv, dafter, dq.shape[1])

    return Pair(forward, backward)


def require_first(before: dict):
    """ValueError unless nothing lies before the tokens."""
    if before["k"].shape[1]:
        raise ValueError(f"ulysses: {before['k'].shape[1]} keys lie before the tokens, and there must be none: they are kept by tokens, "
                         f"and would be exchanged for heads again with each slice")


def context_core(cp, option: str, kv_heads: int, dropped: Callable = lambda first: None, window: int = EVERYTHING,
                 plan=blocks.blocks) -> Pair:
    """The filling of `core` for an option of attention over cp, whose tokens lie in that option's order (`parallel/order.py`).

    kv_heads: key heads of this rank.  plan: see `blocks.remembering`, which should remember as many answers as cp has ranks.
    """
    if option == "gather":
        return gather(cp, option, dropped(0), window, plan)
    if option == "ulysses":
        return ulysses(cp, option, dropped, window, plan)
    if option == "ulysses+ring":
        return ulysses(cp, option, dropped, window, plan, group_size(cp.size, kv_heads))
    return ring(cp, option, dropped(0), window, plan)
