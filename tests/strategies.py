"""Strategies that draw whole situations: a model of any sizes, a mesh, a batch as hostile as a text can make it.

What they must reach is tested in `test_strategies.py`; a property is worth what its situations reach.
"""
from __future__ import annotations

from hypothesis import strategies as st

from refpar.config import Layout, Model, Training
from refpar.oracle.situation import Situation

PATTERNS = (("attention", "mlp"), ("mamba2",), ("attention", "mlp", "mamba2"), ("mamba2", "mlp"))


@st.composite
def models(draw) -> Model:
    """Small models of each family, and hybrids, whose sizes divide nothing in particular.

    A tensor of one or two numbers may cancel to almost nothing, and its bound with it: then rounding far above it decides, and no
    bound of its own magnitude can hold.  So every contracted dim has at least three numbers.
    """
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Model(pattern=draw(st.sampled_from(PATTERNS)), blocks=draw(st.integers(1, 2)), vocab=draw(st.integers(5, 13)),
                 width=draw(st.integers(4, 9)), heads=kv_heads * draw(st.integers(1, 3)), kv_heads=kv_heads,
                 head_width=2 * draw(st.integers(2, 3)), ffn=draw(st.integers(3, 9)), ssm_heads=groups * draw(st.integers(1, 3)),
                 ssm_head_width=draw(st.integers(3, 5)), groups=groups, state=draw(st.integers(3, 5)), conv=draw(st.integers(1, 5)),
                 chunk=draw(st.integers(1, 6)), tied=draw(st.booleans()), dropout=draw(st.sampled_from((0.0, 0.0, 0.3))))


@st.composite
def situations(draw, most_ranks: int = 5) -> Situation:
    """A data-parallel run: ranks without rows, rows without targets, a last window with fewer rows than the others."""
    rows = draw(st.integers(1, 7))
    training = Training(steps=2, rows=rows, sequence=draw(st.integers(1, 11)), micro_batches=draw(st.integers(1, 3)),
                        optimizer=draw(st.sampled_from(("adamw", "sgd"))), rate=0.01, warmup=0,
                        clip=draw(st.sampled_from((0.0, 0.1, 1e3))), seed=draw(st.integers(0, 999)),
                        dtype=draw(st.sampled_from(("float64", "float64", "float32"))))
    return Situation(draw(models()), Layout(dp=draw(st.integers(1, most_ranks))), training, last_rows=draw(st.integers(0, rows)),
                     documents=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))),
                     ignored=tuple(draw(st.lists(st.sampled_from((0.0, 0.4, 1.0)), min_size=1, max_size=4))))
