"""The FLOPs of the survey's section 5, corrected, are what the layers count: forward and backward, whole and cut, of any sizes."""
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar import watch
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import Model
from refpar.corpus import micro_batches
from refpar.nn.gradient import zeros_like
from refpar.nn.init import initial
from refpar.nn.product import settle
from refpar.oracle.packed import packed
from refpar.parallel import fill
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut as part
from refpar.plan import survey_work
from refpar.plan.survey import Sizes
from refpar.plan.survey_work import TERMS, Cut, by_ops, corrected

# Op of backward -> the term's.
UPWARD = {"input gradient": "linear", "weight gradient": "linear", **dict.fromkeys(
    ("attention dp", "attention dv", "attention dk", "attention dq"), "attention scores")}


def one_layer(wire, config: Model, cut: Cut, rows: int, length: int):
    """FLOPs of this rank by op, forward and backward."""
    mesh = Mesh(cut.layout, wire)
    chain = fill.model(config, mesh)
    params = initial(config, chain, 0, np.float64, cut=lambda name, dims: part(config, dims, mesh), rough=True)
    name, layer = chain.layers[1]
    mine = micro_batches(rows, cut.layout.dp, mesh.axis("dp").index, 1)[0]
    batch = part_of(packed(0, rows, length, 9, (10_000,)).cut(mine), way_of(config, cut.layout), mesh.axis("cp"))
    x = np.ones((*batch.tokens.shape, config.width))
    with watch.watching(watch.Ledger()) as forward:
        y, after, saved = layer.forward(x, params[name], batch, layer.start(params[name], batch))
    with watch.watching(watch.Ledger()) as backward:
        *_, grads = layer.backward(y, zeros_like(after), saved, params[name], batch)
        settle(grads)
    return forward.flops, backward.flops


def counted(told) -> list[Counter]:
    """All ranks' together, forward and backward, by the forward's ops."""
    ways = [Counter(), Counter()]
    for rank in told:
        for way, flops in zip(ways, rank):
            for op, count in flops.items():
                way[UPWARD.get(op, op)] += count
    return ways


@st.composite
def cases(draw):
    """A model, a cut of at most 6 ranks that leaves no rank without a head, and rows of one document each."""
    ranks, kv_heads, groups = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    config = Model(pattern=(draw(st.sampled_from(("attention", "mlp", "mamba2"))),), blocks=1, width=draw(st.integers(4, 9)),
                   heads=6 * kv_heads, kv_heads=kv_heads, head_width=draw(st.sampled_from((2, 4))), ffn=draw(st.integers(6, 9)),
                   mlp=draw(st.sampled_from(("swiglu", "gelu"))),
                   ssm_heads=6 * groups, ssm_head_width=draw(st.integers(1, 3)), groups=groups, state=draw(st.integers(1, 3)),
                   chunk=draw(st.integers(1, 9)))
    ways = {"attention": ("dp", "tp", "cp", "ulysses"), "mlp": ("dp", "tp", "cp"), "mamba2": ("dp", "tp", "cp", "heads")}
    length = draw(st.sampled_from((1, 5, 16, 30, 64, 65, 150)))
    return config, Cut(draw(st.sampled_from(ways[config.pattern[0]])), ranks), draw(st.integers(1, 3)), length


def check(config: Model, cut: Cut, rows: int, length: int):
    z, kind = Sizes.of(config, rows, length), config.pattern[0]
    for upward, way in enumerate(counted(ThreadWorld().run(one_layer, cut.ranks, config, cut, rows, length))):
        promised = by_ops(kind, z, cut, bool(upward))
        for ops, flops in promised.items():
            assert sum(way[op] for op in ops) == pytest.approx(float(flops), rel=1e-12), (ops, upward)
        assert sum(way.values()) == pytest.approx(float(sum(promised.values())), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_terms_are_what_is_counted(case):
    """Each by its ops, and nothing beside them."""
    check(*case)


@pytest.mark.parametrize("ranks, length", [(1, 700), (3, 1000)])
def test_terms_of_rows_of_several_blocks(ranks, length):
    """Blocks of 64 queries, and in rows of more than 512 tokens of 128."""
    check(Model(pattern=("attention",), blocks=1, width=4, heads=2, kv_heads=1, head_width=2), Cut("cp", ranks), 1, length)


def test_the_corrections_are_all_that_differs():
    """Without a mask, elementwise work, groups and uneven chunks the printed totals stand; and each correction changes something."""
    z = Sizes.of(Model(width=24, heads=6, kv_heads=2, head_width=4, ssm_heads=6, groups=6, chunk=16), 2, 64)
    for term in TERMS:
        idle = [step.why for step in term.steps if step not in (survey_work.SEEN, survey_work.MASKED, survey_work.NO_PRODUCT)]
        left = term._replace(steps=tuple(step for step in term.steps if step.why in idle))
        assert corrected(left, z, Cut("dp", 2)) == pytest.approx(term.figure(z)), term.name
    odd = Sizes.of(Model(width=20, heads=6, kv_heads=2, head_width=4, ssm_heads=6, groups=2, chunk=16, mlp="gelu"), 2, 70)
    for term in TERMS:
        for step in term.steps:
            assert any(step.to(7.0, odd, Cut(way, 4)) != 7.0 for way in ("tp", "cp")), (term.name, step.why)


def test_the_survey_is_right_that_all_ways_do_the_same_work():
    """Where no group is shared, and chunks and blocks are whole: whatever is cut."""
    z = Sizes.of(Model(width=32, heads=8, kv_heads=4, head_width=4, ssm_heads=8, groups=4, chunk=16), 4, 512)
    for term in TERMS:
        works = {corrected(term, z, Cut(way, 4)) for way in ("dp", "tp", "cp", "ulysses")}
        assert len(works) == 1, term.name
