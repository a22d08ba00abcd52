"""The one comparison: what counts as equal, and what its sentence says."""
import numpy as np
import pytest

from refpar.oracle.equal import assert_equal, bound, compare, distance, leaves


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_bound_is_one(dtype):
    b = np.array([1.0, 4.0], dtype)
    step = bound(dtype, 16, 4.0)
    assert step == 32 * np.finfo(dtype).eps * 4 * 4
    assert distance(b + np.array([step, 0], dtype), b, 16) == pytest.approx(1, rel=1e-2)
    assert distance(b, b + np.array([2 * step, 0], dtype), 16) == pytest.approx(2, rel=1e-2)


def test_reordered_sums_are_equal_and_lost_addends_are_not():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 1000)).astype(np.float32)
    whole, reordered = x.sum(axis=1), np.add.accumulate(x[:, rng.permutation(1000)], axis=1)[:, -1]
    assert_equal(reordered, whole, 1000, scale=np.abs(x).max() * 1000)
    assert distance(reordered, whole, 1000) < 1
    assert distance(x[:, 1:].sum(axis=1), whole, 1000) > 100


@pytest.mark.parametrize("a, b, equal", [
    (np.nan, np.nan, False), (np.nan, 1.0, False), (np.inf, np.inf, True), (np.inf, -np.inf, False), (np.inf, 1.0, False),
    (0.0, 0.0, True), (1e-300, 0.0, False), (-0.0, 0.0, True), (5e-324, 0.0, True), (1.0, 1.0, True)])
def test_values_at_the_edge(a, b, equal):
    assert (distance(np.array([1e-305, a]), np.array([1e-305, b]), 4) <= 1) == equal
    if not equal:
        with pytest.raises(AssertionError, match=r"^x\[1\] is "):
            assert_equal(np.array([0, a]), np.array([0, b]), 4, name="x")


def test_whole_numbers_are_equal_or_not_at_all():
    big = np.array([2**62, 2**62 + 1])
    assert distance(big, big, 9) == 0
    assert distance(big, big[::-1], 9) == np.inf
    assert distance(np.array([True]), np.array([False]), 1) == np.inf


def test_empty_arrays_are_equal():
    assert distance(np.zeros((0, 3)), np.zeros((0, 3)), 1) == 0
    assert_equal(np.zeros((0, 3)), np.zeros((0, 3)), 1)


def test_the_sentence_names_the_first_wrong_index():
    a, b = np.zeros((2, 3)), np.zeros((2, 3))
    b[0, 2], b[1, 1], b[1, 2] = 1, 2, 8
    a[1, 2] = 8
    with pytest.raises(AssertionError, match=r"^q\[0, 2\] is 0.0 and must be 1.0: .* n=7 and scale 8 \(2 of 6 elements"):
        assert_equal(a, b, 7, name="q")


@pytest.mark.parametrize("a, b, sentence", [
    (np.zeros(3), np.zeros((3, 1)), r"x has shape \[3\] and must have \[3, 1\]"),
    (np.zeros(3, np.float32), np.zeros(3), "x is float32 and must be float64"),
    (None, np.zeros(3), "x is None and must be an array")])
def test_shapes_and_dtypes_must_match(a, b, sentence):
    with pytest.raises(AssertionError, match=f"^{sentence}$"):
        assert_equal(a, b, 1, name="x")
    with pytest.raises(AssertionError, match=f"^{sentence}$"):
        compare({"x": a}, {"x": b}, 1)


def test_a_number_of_python_has_no_dtype():
    assert_equal(1.0, np.float32(1), 1)


def test_coarser_dtype_counts_in_a_distance():
    third = np.array([1 / 3])
    assert distance(third.astype(np.float32), third, 1) < 1 < distance(third * (1 + 1e-6) ** 9, third, 1)


def test_compare_names_by_dots_in_order():
    tree = {"1.attention": {"q": np.ones(2), "k": np.ones(3)}, "0.embedding": {"table": np.ones(1), "memory": None}}
    off = {"0.embedding": {"table": np.full(1, 2.0), "memory": None}, "1.attention": {"k": np.ones(3), "q": np.ones(2)}}
    assert list(compare(tree, off, 1)) == ["1.attention.q", "1.attention.k", "0.embedding.table"]
    assert [d > 1 for d in compare(tree, off, 1).values()] == [False, False, True]
    assert [name for name, _ in leaves(tree)][-1] == "0.embedding.memory"
    with pytest.raises(AssertionError, match="^1.attention.k is in one of the two trees only"):
        compare(tree, {"0.embedding": tree["0.embedding"], "1.attention": {"q": np.ones(2)}}, 1)


def test_n_counts_addends():
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        distance(1.0, 1.0, 0)
