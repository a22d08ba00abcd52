"""Two layouts, and a model whose parameters go from one to the other."""
from hypothesis import strategies as st
from strategies import models

from refpar.config import AXES, Layout
from refpar.oracle.properties_reshard import ReshardSituation


@st.composite
def layouts(draw, most_ranks: int) -> Layout:
    """Any mesh of dp, cp and tp, in any order of axes: often with more tp ranks than a model has heads or groups."""
    tp = draw(st.integers(1, most_ranks))
    dp = draw(st.integers(1, most_ranks // tp))
    return Layout(dp=dp, cp=draw(st.integers(1, most_ranks // (tp * dp))), tp=tp, order=tuple(draw(st.permutations(AXES))))


def situations(most_ranks: int = 6) -> st.SearchStrategy[ReshardSituation]:
    return st.builds(ReshardSituation, models(), layouts(most_ranks), layouts(most_ranks), st.sampled_from(("float64", "float32")))
