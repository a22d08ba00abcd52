"""Situations of a loss over words that ranks share, drawn: fewer words than ranks, no tokens, logits of any size."""
from hypothesis import strategies as st

from refpar.oracle.situation_loss import LossSituation


@st.composite
def situations(draw, most: int = 4) -> LossSituation:
    """Every field is drawn."""
    return LossSituation(draw(st.integers(1, most)), draw(st.integers(0, 9)), draw(st.integers(1, 9)), draw(st.sampled_from((0, 0, 3))),
                         draw(st.sampled_from((1.0, 30.0, 1000.0))), draw(st.sampled_from((0.0, 0.4, 1.0))),
                         draw(st.sampled_from((0.0, 0.2))), draw(st.sampled_from((0.0, 0.1))),
                         draw(st.sampled_from(("float64", "float32"))), draw(st.integers(0, 999)))
