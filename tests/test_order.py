"""Orders of tokens over cp: every token once, evenly, and the places of all ranks known to each."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refpar.comm.mesh import Axis
from refpar.oracle.packed import packed
from refpar.parallel.order import ORDERS, columns, part_of


@given(st.sampled_from(sorted(ORDERS)), st.integers(0, 40), st.integers(1, 9))
def test_every_token_is_held_once(way, length, ranks):
    parts = [columns(way, length, ranks, rank) for rank in range(ranks)]
    assert sorted(np.concatenate(parts)) == list(range(length)) and {part.dtype for part in parts} == {np.dtype(np.int64)}
    assert max(map(len, parts)) - min(map(len, parts)) <= 2


def test_orders_as_the_papers_draw_them():
    """Eight tokens on two ranks."""
    assert columns("ring", 8, 2, 1).tolist() == [4, 5, 6, 7]
    assert columns("zigzag", 8, 2, 0).tolist() == [0, 1, 6, 7] and columns("zigzag", 8, 2, 1).tolist() == [2, 3, 4, 5]
    assert columns("striped", 8, 2, 1).tolist() == [1, 3, 5, 7]
    assert [columns("zigzag", 7, 2, rank).tolist() for rank in (0, 1)] == [[0, 5, 6], [1, 2, 3, 4]]
    with pytest.raises(ValueError, match="order: 'round' must be one of contiguous, ring"):
        columns("round", 8, 2, 0)


def test_a_part_knows_its_whole():
    """Rows are cut from both, columns from the part alone."""
    batch = packed(0, rows=3, sequence=9, vocab=50)
    part = part_of(batch, "zigzag", Axis("cp", (0, 1), 1, None))
    assert part.whole is batch and np.array_equal(part.index, batch.index[:, columns("zigzag", 9, 2, 1)])
    rows = part.cut(slice(1, 3))
    assert np.array_equal(rows.whole.tokens, batch.tokens[1:]) and np.array_equal(rows.tokens, part.tokens[1:])
    assert np.array_equal(part.cut(columns=slice(2)).whole.tokens, batch.tokens)
    assert batch.cut(slice(1)).whole is None
