"""Faults of state-space models over context-parallel ranks: of what one rank hands to the next, and of who has which head.

As in `faults.py`.  What hides them: one rank, shards longer than the conv, one group, one head.
"""
from __future__ import annotations

from dataclasses import replace

from refpar.oracle.plant import Fault
from refpar.oracle.situation_state import StateSituation

ONE_DOCUMENT = (10_000,)
SHORT = StateSituation(ranks=4, tokens=6, documents=ONE_DOCUMENT)       # shards of 1 and 2 tokens, a conv that sees 3 back
LONG = replace(SHORT, tokens=16)
NEIGHBOURS = StateSituation(ranks=3, documents=ONE_DOCUMENT)
ALONE = replace(NEIGHBOURS, ranks=1, given=False, rows=1)               # one row, that begins a document
BY_HEADS = replace(NEIGHBOURS, option="heads", ranks=4)

CONV, STATE = "refpar.nn.conv", "refpar.parallel.state"
CONTEXT = "context_state"

HALO = (
    Fault("halo-of-the-neighbour", "fla-org/flash-linear-attention#774",
          "the conv's halo comes from the rank before alone, and a shard shorter than the halo has too few inputs for it",
          f"{CONV}:tail_merge", "second.rows + _moved(first.rows, second.count)",
          "second.rows + _moved(first.rows, second.count + len(first.rows[0]) * (second.count > 0))", SHORT, LONG, CONTEXT),
    Fault("halo-gradient-dropped", "fla-org/flash-linear-attention#774",
          "the gradient of the halo comes back to its owner, who does not add it",
          f"{CONV}:conv_backward", "dpadded[last] += here.rows", "dpadded[last] += 0 * here.rows", NEIGHBOURS, ALONE, CONTEXT),
    Fault("halo-gradient-assigned", "fla-org/flash-linear-attention#774",
          "the gradient of the halo takes the place of the owner's own, to which it must be added",
          f"{CONV}:conv_backward", "dpadded[last] += here.rows", "dpadded[last] = here.rows", NEIGHBOURS,
          replace(NEIGHBOURS, conv=1), CONTEXT),
    Fault("halo-of-zeros", "fla-org/flash-linear-attention#774",
          "every rank begins its conv with zeros, whatever inputs the ranks before it have",
          f"{CONV}:conv_forward", "[here.rows, x]", "[0 * here.rows, x]", NEIGHBOURS, ALONE, CONTEXT),
)

HANDED_ON = (
    Fault("given-state-forgotten", "state-spaces/mamba#641",
          "the summaries of earlier ranks are merged, and the state that was given before them all is left out",
          f"{STATE}:_gather", "reduce(merge, every[:cp.index], given)", "reduce(merge, every[:cp.index]) if cp.index else given",
          NEIGHBOURS, replace(NEIGHBOURS, given=False), CONTEXT),
    Fault("given-state-forgotten-in-the-scan", "state-spaces/mamba#641",
          "the same in the logarithmic form: the first rank hands on its own tokens alone",
          f"{STATE}:_scan", "merge(given, own) if cp.index == 0 else own", "own", replace(NEIGHBOURS, option="scan"),
          replace(NEIGHBOURS, option="scan", given=False), CONTEXT),
    Fault("decay-of-the-first-head", "fla-org/flash-linear-attention#1115",
          "at the boundary of ranks backward reads the decay without the head's offset: that of head 0 for all",
          "refpar.nn.ssd:ssd_backward", "reduce(merge, reversed(summaries), nothing)",
          "(lambda own: own._replace(decay=own.decay[:, :1] + 0 * own.decay))(reduce(merge, reversed(summaries), nothing))",
          NEIGHBOURS, replace(NEIGHBOURS, heads=1, groups=1), CONTEXT),
)

LABELS = (
    Fault("local-positions", "NovaSky-AI/SkyRL#2056",
          "a rank counts positions from its own first token: every shard begins a document, and those inside it go on",
          "refpar.parallel.order:together", "_replace(whole=whole)",
          "_replace(whole=whole, position=np.arange(len(held)) + 0 * whole.position[:, held])",
          replace(NEIGHBOURS, documents=(5, 9)), ALONE, CONTEXT),
    Fault("groups-dealt-out-over-ranks", "vllm-project/vllm#55091",
          "more ranks than groups are given B and C in turn, where those that share a group's heads stand together",
          "refpar.parallel.ulysses:head_parts", "slice(head, head + (mine.stop > mine.start))",
          "slice(len(parts) % kv_heads, len(parts) % kv_heads + (mine.stop > mine.start))",
          BY_HEADS, replace(BY_HEADS, groups=1), CONTEXT),
)

STATE_OVER_RANKS: tuple[Fault, ...] = HALO + HANDED_ON + LABELS
