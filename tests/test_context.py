"""Attention over context-parallel ranks: every option is attention, sends what its formula says, and is refused with a sentence."""
from dataclasses import replace

import numpy as np
import pytest
from drawn import check, first
from strategies_cp import situations

from refpar import watch
from refpar.comm.mesh import Axis
from refpar.comm.threads import ThreadWorld
from refpar.nn import attention
from refpar.oracle import properties_cp
from refpar.oracle.situation_cp import ContextSituation
from refpar.parallel.context import ring
from refpar.parallel.order import columns, part_of
from refpar.parallel.travel import rings, round_trip
from refpar.parallel.ulysses import group_size, head_parts, ulysses

EXAMPLES = 60


def test_context_attention(world):
    check(world, properties_cp.context_attention, situations(world.size or 6), EXAMPLES if world.kind == "threads" else 10)


def test_context_counts(world):
    check(world, properties_cp.context_counts, situations(world.size or 6), EXAMPLES if world.kind == "threads" else 5)


DRAWN = situations()
CORNERS = {
    "rows shorter than the ranks": lambda s: 0 < s.length < s.ranks,
    "no token at all": lambda s: s.length == 0,
    "lengths that do not divide": lambda s: s.length % s.ranks > 0,
    "zigzag that does not divide": lambda s: s.way == "zigzag" and s.length % (2 * s.ranks) > 0,
    "an empty shard": lambda s: any(len(columns(s.way, s.length, s.ranks, rank)) == 0 for rank in range(s.ranks)),
    "fewer key heads than ranks that exchange heads": lambda s: s.way == "ulysses" and s.kv_heads < s.ranks,
    "key heads that do not divide": lambda s: s.way == "ulysses" and s.kv_heads > s.ranks and s.kv_heads % s.ranks > 0,
    "a rank without heads": lambda s: s.way == "ulysses" and s.heads < s.ranks,
    "a mix of both": lambda s: s.way == "ulysses+ring" and 1 < group_size(s.ranks, s.kv_heads) < s.ranks,
    "a ring of two levels": lambda s: s.way == "ring" and s.node and 1 < s.node < s.ranks and s.ranks % s.node == 0,
    "nodes of unequal size": lambda s: s.node and s.node < s.ranks and s.ranks % s.node > 0,
    "a rank whose keys nobody else sees": lambda s: s.way == "ring" and s.ranks > 1 and s.documents == (1,),
    "pads": lambda s: s.pads > 0 and s.ranks > 1,
    "loud queries of few bits": lambda s: s.loud > 1 and s.dtype == "float32" and s.ranks > 1,
    "a window over a boundary": lambda s: s.ranks > 1 and 1 < s.window < s.length,
    "dropout by heads, behind others": lambda s: s.dropout > 0 and s.way == "ulysses" and s.first > 0,
}


@pytest.mark.parametrize("corner", CORNERS)
def test_situations_reach(corner):
    assert first(DRAWN, CORNERS[corner]) is not None


def test_heads_of_ranks():
    """Whole groups where there are enough; else a run of ranks shares the query heads of one key head."""
    assert head_parts(6, 3, 2) == [(slice(0, 2), slice(0, 1)), (slice(2, 6), slice(1, 3))]
    assert head_parts(4, 1, 3) == [(slice(0, 1), slice(0, 1)), (slice(1, 2), slice(0, 1)), (slice(2, 4), slice(0, 1))]
    assert head_parts(2, 2, 3) == [(slice(0, 1), slice(0, 1)), (slice(1, 1), slice(1, 1)), (slice(1, 2), slice(1, 2))]
    assert head_parts(0, 1, 2) == [(slice(0, 0), slice(0, 0))] * 2
    assert [group_size(6, kv_heads) for kv_heads in (1, 2, 3, 4, 6, 9)] == [1, 2, 3, 3, 6, 6]


def test_levels_of_a_ring():
    """Two nodes of two ranks: rank 2 goes round with 3 on its node, and with 0 across."""
    circle = rings(Axis("cp", (0, 1, 2, 3), 2, None, node=2))
    assert (circle.inner.ranks, circle.outer.ranks) == ((2, 3), (0, 2))
    uneven = rings(Axis("cp", (0, 1, 2), 2, None, node=2))
    assert (uneven.inner.ranks, uneven.outer.ranks) == ((0, 1, 2), (2,))


def program_round_trip(wire):
    """Every rank adds its number, in digits, to what belongs to each; where whom it met is noted."""
    axis, met = Axis.world(wire), []

    def visit(owner, x):
        met.append((owner, int(x[0])))
        return np.full(owner + 1, 10.0 ** wire.rank)
    return round_trip(np.full(wire.rank, 7.0 + wire.rank) if wire.rank else np.array([7.0]), axis, [1, 1, 2], visit, [1, 2, 3]), met


def test_a_round_trip_brings_everybody_home():
    for eager in (0, 65536):
        for rank, (home, met) in enumerate(ThreadWorld(eager=eager).run(program_round_trip, 3)):
            assert home.tolist() == [111.0] * (rank + 1)
            assert met == [(owner % 3, 7 + owner % 3) for owner in (rank, rank + 2, rank + 1)]


def program_flops(wire, situation):
    with watch.watching(watch.Ledger()) as ledger:
        properties_cp.run_rank(wire, situation)
    return sum(ledger.flops.values())


def test_hidden_keys_cost_nothing_and_zigzag_shares_the_rest():
    """A contiguous ring: the last rank does all of its hops, the first only its own.  In a zig-zag all do as much."""
    long = ContextSituation(ranks=4, rows=1, tokens=1024, heads=1, kv_heads=1)
    contiguous = ThreadWorld().run(program_flops, 4, long)
    assert contiguous == sorted(contiguous) and contiguous[3] > 5 * contiguous[0]
    zigzag = ThreadWorld().run(program_flops, 4, replace(long, way="zigzag"))
    assert max(zigzag) < 1.1 * min(zigzag)


def program_peak(wire, situation):
    with watch.watching(watch.Ledger()) as ledger:
        properties_cp.run_rank(wire, situation)
    return ledger.peak["received"]


@pytest.mark.parametrize("way, shards", [("ring", 2), ("gather", 8)])
def test_a_ring_receives_the_keys_of_two_ranks_at_a_time(way, shards):
    situation = ContextSituation(ranks=8, way=way, tokens=32)
    keys = 2 * 2 * 4 * 2 * 4                                                    # [2, B, S/c, K, E]
    assert max(ThreadWorld().run(program_peak, 8, situation)) == shards * keys


def program_refused(wire, case):
    cp, situation = Axis.world(wire), ContextSituation(ranks=2)
    part = part_of(situation.batch(), "ring", cp)
    q, k, v, _ = (x[:, :part.tokens.shape[1]] for x in situation.drawn())
    before = attention.start(part, 2, 4, q.dtype)
    if case == "groups":
        return ulysses(cp, "ulysses", group=3)
    if case == "before":
        before = attention.extend(before, k, v, part)
    way = ulysses if case == "before" else ring
    return way(cp, "ring").forward(q, k, v, part._replace(whole=None) if case == "whole" else part, before)


@pytest.mark.parametrize("case, sentence", [("whole", "must be a part of whole rows"), ("before", "4 keys lie before the tokens"),
                                            ("groups", "groups of 3 ranks must divide the 2 ranks")])
def test_what_is_refused(case, sentence):
    with pytest.raises(ValueError, match=sentence):
        ThreadWorld().run(program_refused, 2, case)
