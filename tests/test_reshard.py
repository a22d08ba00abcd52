"""Resharding: any layout to any other equals cutting the whole, every missing element sent once."""
import dataclasses

import pytest
from drawn import check, first
from strategies_reshard import situations

from refpar.config import PRESETS, Layout
from refpar.nn.build import build
from refpar.oracle.properties_reshard import fresh_is_cutting, loading_is_cutting, reshard_is_cutting
from refpar.reshard import Move, Place, holders, moves
from refpar.plan import reshard as formula

HEADS, GROUPS = PRESETS["llama-tiny"], PRESETS["mamba2-tiny"]           # 2 key heads, 2 groups


def test_reshard_is_cutting(world):
    check(world, reshard_is_cutting, situations(5 if world.kind == "threads" else 4),
          examples=25 if world.kind == "threads" else 8)


@pytest.mark.parametrize("holds", [fresh_is_cutting, loading_is_cutting])
def test_a_run_begins_with_parts_of_the_whole(world, holds):
    check(world, holds, situations(5 if world.kind == "threads" else 4, most_stages=1), examples=12 if world.kind == "threads" else 5)


DRAWN = situations()
CORNERS = {
    "more ranks after": lambda s: s.after.ranks > s.before.ranks,
    "fewer ranks after": lambda s: 1 < s.after.ranks < s.before.ranks,
    "tp to tp, neither divides the other": lambda s: {s.before.tp, s.after.tp} == {2, 3},
    "more ranks than key heads": lambda s: "attention" in s.model.pattern and s.before.tp > s.model.kv_heads > 1,
    "more ranks than groups, another order": lambda s: "mamba2" in s.model.pattern and s.after.tp > s.model.groups
                                                       and s.after.order != s.before.order and s.after.dp > 1,
    "more ranks than heads": lambda s: "attention" in s.model.pattern and s.after.tp > s.model.heads,
    "uneven": lambda s: "mlp" in s.model.pattern and s.model.ffn % s.before.tp and s.model.ffn % s.after.tp and s.before.tp > 1,
    "stages to other stages": lambda s: s.before.pp != s.after.pp > 1 and s.before.pp > 1,
    "stages without layers": lambda s: s.after.pp > len(s.model.pattern) * s.model.blocks,
    "a table on two stages": lambda s: s.model.tied and s.before.pp > 1,
    "gate and up": lambda s: "mlp" in s.model.pattern and s.model.mlp == "swiglu" and s.before.tp > 1,
}


@pytest.mark.parametrize("corner", CORNERS)
def test_situations_reach(corner):
    assert first(DRAWN, CORNERS[corner]) is not None


def test_a_run_of_ranks_holds_one_block():
    """Two key heads on five ranks: runs of two and of three.  To one rank each head is sent once, by the first of its run."""
    name, five = ("1.attention", "k"), Place(Layout(tp=5))
    blocks = holders(HEADS, name, "D KE/tp", five)
    assert list(blocks.values()) == [[0, 1], [2, 3, 4]]
    first, second = blocks
    assert moves(HEADS, name, "D KE/tp", five, Place(Layout())) == [Move(0, 0, first), Move(2, 0, second)]


def test_what_a_formula_promises():
    """Gathering sends all but rank 0's part; the same layout, and dp to fewer dp, nothing."""
    dims = build(dataclasses.replace(HEADS, blocks=1)).dims()

    def sent(before, after, ranks):
        return sum(formula.reshard(HEADS, dims, Place(before), Place(after), rank).elements for rank in range(ranks))
    sharded = sum(size for size in map(size_of, sharded_dims(dims)))
    assert sent(Layout(tp=2), Layout(), 2) == sharded // 2 == sent(Layout(tp=2, dp=2), Layout(), 4)
    assert sent(Layout(dp=3, tp=2), Layout(dp=2, tp=2), 6) == sent(Layout(dp=4), Layout(dp=2), 4) == 0
    assert sent(Layout(), Layout(dp=3), 3) == 2 * sum(size_of(text) for group in dims.values() for text in group.values())


def sharded_dims(dims):
    return [text for group in dims.values() for text in group.values() if "/tp" in text]


def size_of(text):
    size = 1
    for side in HEADS.shape(text):
        size *= side
    return size
