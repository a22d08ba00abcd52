"""Situations of attention over cp, drawn: all options, and every corner that has been got wrong."""
from functools import cache

from hypothesis import strategies as st

from refpar.oracle.situation_cp import ContextSituation

WAYS = [("ring", "kv"), ("zigzag", "kv"), ("striped", "kv"), ("ring", "q"), ("zigzag", "q"), ("gather", "kv"), ("ulysses", "kv"),
        ("ulysses+ring", "kv")]


@cache
@st.composite
def situations(draw, most: int = 6, dtypes=("float64", "float32")):
    """Whole situations; every field is drawn.  Rows shorter than the ranks are as likely as longer ones."""
    way, moved = draw(st.sampled_from(WAYS))
    kv_heads = draw(st.sampled_from((1, 2, 3, 4)))
    ranks = draw(st.sampled_from([ranks for ranks in (2, 3, 4, 6, 1, 5, 8) if ranks <= most]))
    return ContextSituation(
        ranks, way, moved, rows=draw(st.integers(1, 2)), tokens=draw(st.sampled_from((8, 17, 3, 1, 2, 13, 24, 0))),
        pads=draw(st.sampled_from((0, 0, 3))), heads=kv_heads * draw(st.sampled_from((1, 2, 3))), kv_heads=kv_heads,
        width=draw(st.sampled_from((4, 6))), window=draw(st.sampled_from((0, 0, 1, 3, 6))),
        documents=draw(st.sampled_from(((10_000,), (5, 9), (1,), (7, 1, 12, 3)))), loud=draw(st.sampled_from((1.0, 30.0, 100.0))),
        first=draw(st.sampled_from((0, 4))), dropout=draw(st.sampled_from((0.0, 0.0, 0.3))), dtype=draw(st.sampled_from(dtypes)),
        node=draw(st.sampled_from((None, 2, 1, 3))), seed=draw(st.integers(0, 999)))
