"""Two layouts, and a model whose parameters go from one to the other."""
from hypothesis import strategies as st
from strategies import models

from refpar.config import AXES, Layout
from refpar.oracle.properties_reshard import ReshardSituation


@st.composite
def layouts(draw, most_ranks: int, most_stages: int) -> Layout:
    """Any mesh, in any order of axes: often with more tp ranks than a model has heads or groups."""
    tp = draw(st.integers(1, most_ranks))
    pp = draw(st.integers(1, min(most_stages, most_ranks // tp)))
    dp = draw(st.integers(1, most_ranks // (tp * pp)))
    return Layout(dp=dp, pp=pp, cp=draw(st.integers(1, most_ranks // (tp * pp * dp))), tp=tp, order=tuple(draw(st.permutations(AXES))))


def situations(most_ranks: int = 6, most_stages: int = 4) -> st.SearchStrategy[ReshardSituation]:
    """most_stages: of a pipeline."""
    drawn = layouts(most_ranks, most_stages)
    return st.builds(ReshardSituation, models(), drawn, drawn, st.sampled_from(("float64", "float32")))
