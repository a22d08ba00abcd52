"""The small operations: finite differences, their definitions, sums that can be sharded, and the width of their numbers."""
import numpy as np
import pytest
from derivative import assert_derivative
from hypothesis import given
from hypothesis import strategies as st

from refpar import watch
from refpar.nn import ops
from refpar.nn.product import settle
from refpar.oracle.equal import assert_equal

leading = st.lists(st.integers(0, 4), min_size=1, max_size=3)
seeds = st.integers(0, 10**6)


def check(function, backward, inputs, seed, **options):
    """function(**inputs) -> y, saved; backward(dy, saved) -> {input: gradient}."""
    rng = np.random.default_rng(seed + 1)
    y, saved = function(**inputs)
    dy = rng.standard_normal(y.shape)
    assert_derivative(lambda given: function(**given)[0], inputs, backward(dy, saved), dy, rng)


@given(seeds, leading, st.integers(1, 5), st.integers(1, 5))
def test_linear(seed, shape, inward, outward):
    rng = np.random.default_rng(seed)
    inputs = {"x": rng.standard_normal((*shape, inward)), "w": rng.standard_normal((inward, outward))}

    def backward(dy, saved):
        dx, dw = ops.linear_backward(dy, saved, inputs["w"])
        return {"x": dx, "w": settle(dw)}
    check(ops.linear_forward, backward, inputs, seed)


@given(seeds, leading, st.integers(1, 3))
def test_stacked(seed, shape, n):
    rng = np.random.default_rng(seed)
    inputs = {"x": rng.standard_normal((*shape, 3)), "w": rng.standard_normal((n, 3, 4))}

    def backward(dy, saved):
        dx, dw = ops.stacked_backward(dy, saved, inputs["w"])
        return {"x": dx, "w": settle(dw)}
    check(ops.stacked_forward, backward, inputs, seed)
    y, _ = ops.stacked_forward(**inputs)
    for y_i, w_i in zip(y, inputs["w"]):
        assert_equal(y_i, ops.linear_forward(inputs["x"], w_i)[0], n=3)


@given(seeds, leading, st.integers(1, 6))
def test_rmsnorm(seed, shape, width):
    rng = np.random.default_rng(seed)
    inputs = {"x": rng.standard_normal((*shape, width)), "w": rng.standard_normal(width)}
    check(lambda x, w: ops.rmsnorm_forward(x, w, 0.1),
          lambda dy, saved: dict(zip("xw", ops.rmsnorm_backward(dy, saved, inputs["w"]))), inputs, seed)


@given(seeds, st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_squares_of_parts_merge_into_those_of_the_whole(seed, widths):
    """In any nesting; no features at all are the identity."""
    x = np.random.default_rng(seed).standard_normal((3, sum(widths) + 1))
    edges = np.cumsum([0, *widths, 1])
    parts = [ops.squares(x[:, a:b]) for a, b in zip(edges, edges[1:])]
    left, right = parts[0], parts[-1]
    for part in parts[1:]:
        left = ops.squares_merge(left, part)
    for part in reversed(parts[:-1]):
        right = ops.squares_merge(part, right)
    for merged in (left, right, ops.squares_merge(ops.Squares(0, 0), left)):
        assert merged.width == x.shape[1]
        assert_equal(ops.squares_finish(merged, 0.0), 1 / np.sqrt(np.mean(x**2, axis=1, keepdims=True)), n=x.shape[1])


@given(seeds, leading)
def test_silu_and_swiglu(seed, shape):
    rng = np.random.default_rng(seed)
    x = 3 * rng.standard_normal((*shape, 4))
    check(ops.silu_forward, lambda dy, saved: {"x": ops.silu_backward(dy, saved)}, {"x": x}, seed)
    both = rng.standard_normal((2, *shape, 4))
    check(ops.swiglu_forward, lambda dy, saved: {"gate_up": ops.swiglu_backward(dy, saved)}, {"gate_up": both}, seed)
    assert_equal(ops.swiglu_forward(both)[0], ops.silu_forward(both[0])[0] * both[1], n=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoid_is_right_far_from_0_and_warns_of_nothing(dtype):
    x = np.array([-1e4, -90, -1, 0, 1, 90, 1e4], dtype)
    with np.errstate(all="raise", under="ignore"):
        y = ops.sigmoid(x)
    assert_equal(y, (0.5 * (1 + np.tanh(0.5 * x.astype(np.float64)))).astype(dtype), n=1)


@given(seeds, st.integers(0, 4), st.integers(0, 5), st.integers(1, 7), st.integers(0, 7))
def test_embedding_and_its_parts(seed, rows, tokens, vocab, cut):
    """Both halves of a table add up to the whole, forward; backward they are the halves of the gradient."""
    rng = np.random.default_rng(seed)
    words, table, cut = rng.integers(0, vocab, (rows, tokens)), rng.standard_normal((vocab, 3)), min(cut, vocab)
    dx = rng.standard_normal((rows, tokens, 3))
    x, dtable = ops.embedding_forward(words, table), ops.embedding_backward(dx, words, table)
    assert_derivative(lambda w: ops.embedding_forward(words, w["table"]), {"table": table}, {"table": dtable}, dx, rng)
    assert np.array_equal(x, ops.embedding_forward(words, table[:cut]) + ops.embedding_forward(words, table[cut:], cut))
    assert np.array_equal(dtable[:cut], ops.embedding_backward(dx, words, table[:cut]))
    assert np.array_equal(dtable[cut:], ops.embedding_backward(dx, words, table[cut:], cut))


def test_products_are_counted():
    x, w = np.ones((2, 3, 5)), np.ones((5, 7))
    with watch.watching(watch.Ledger()) as ledger:
        y, saved = ops.linear_forward(x, w)
        settle(ops.linear_backward(y, saved, w)[1])
    assert ledger.flops == {name: 2 * 6 * 5 * 7 for name in ("linear", "input gradient", "weight gradient")}
    with watch.watching(watch.Ledger()) as ledger:
        y, saved = ops.stacked_forward(x, np.stack([w, w]))
        settle(ops.stacked_backward(y, saved, np.stack([w, w]))[1])
    assert ledger.flops == {name: 2 * 2 * 6 * 5 * 7 for name in ("linear", "input gradient", "weight gradient")}
