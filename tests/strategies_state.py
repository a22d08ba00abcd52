"""Situations of Mamba over cp, drawn: all options, and every corner that has been got wrong."""
from functools import cache

from hypothesis import strategies as st

from refpar.oracle.situation_state import StateSituation


@cache
@st.composite
def situations(draw, most: int = 6):
    """Whole situations; every field is drawn.  Rows shorter than the ranks, and shards shorter than the conv, are as likely as longer
    ones."""
    groups = draw(st.sampled_from((2, 1, 3, 4)))
    return StateSituation(
        draw(st.sampled_from(("mamba2", "mamba1"))), draw(st.sampled_from(("gather", "chain", "scan", "heads"))),
        draw(st.sampled_from(("contiguous", "zigzag", "striped"))),
        draw(st.sampled_from([ranks for ranks in (2, 3, 4, 6, 1, 5) if ranks <= most])), rows=draw(st.integers(1, 2)),
        tokens=draw(st.sampled_from((16, 9, 5, 3, 1, 0, 23))), pads=draw(st.sampled_from((0, 0, 3))),
        heads=groups * draw(st.sampled_from((2, 1, 3))), groups=groups, conv=draw(st.sampled_from((4, 1, 2, 6))),
        chunk=draw(st.sampled_from((5, 2, 16))), documents=draw(st.sampled_from(((5, 9), (10_000,), (1,), (7, 1, 12, 3)))),
        given=draw(st.booleans()), dtype=draw(st.sampled_from(("float64", "float32"))), node=draw(st.sampled_from((None, 2))),
        seed=draw(st.integers(0, 999)))
