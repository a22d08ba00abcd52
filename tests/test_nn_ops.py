"""The small operations: finite differences, their definitions, sums that can be sharded, and the width of their numbers."""
import math

import numpy as np
import pytest
from derivative import assert_derivative
from hypothesis import given
from hypothesis import strategies as st

from refpar import watch
from refpar.nn import gelu, ops
from refpar.nn.mlp import ACTIVATIONS
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


@given(seeds, leading, st.integers(1, 6))
def test_layernorm(seed, shape, width):
    rng = np.random.default_rng(seed)
    inputs = {"x": 3 + rng.standard_normal((*shape, width)), "w": rng.standard_normal(width), "b": rng.standard_normal(width)}
    check(lambda x, w, b: ops.layernorm_forward(x, w, b, 0.1),
          lambda dy, saved: dict(zip("xwb", ops.layernorm_backward(dy, saved, inputs["w"]))), inputs, seed)
    x = inputs["x"]
    deviation = np.sqrt(x.var(axis=-1, keepdims=True) + 0.1)
    expected = (x - x.mean(axis=-1, keepdims=True)) / deviation * inputs["w"] + inputs["b"]
    assert_equal(ops.layernorm_forward(**inputs, eps=0.1)[0], expected, n=width, scale=10)


@given(seeds, leading, st.sampled_from([0.5, 3.0, 1e3]))
def test_softcap(seed, shape, cap):
    x = 3 * np.random.default_rng(seed).standard_normal((*shape, 4))
    check(lambda x: ops.softcap_forward(x, cap), lambda dy, saved: {"x": ops.softcap_backward(dy, saved, cap)}, {"x": x}, seed)
    y, _ = ops.softcap_forward(x, cap)
    assert_equal(y, cap * np.tanh(x / cap), n=1)
    assert np.abs(y).max(initial=0) <= cap


@given(seeds, leading, st.sampled_from(["gelu", "gelu_tanh"]))
def test_gelu(seed, shape, kind):
    x = 2 * np.random.default_rng(seed).standard_normal((*shape, 4))
    forward, backward = ACTIVATIONS[kind]
    check(forward, lambda dy, saved: {"x": backward(dy, saved)}, {"x": x}, seed)


def test_gelu_is_its_definition_also_far_out():
    """The chance of less than x is precise relative to itself, in the left tail too; the tanh form is near it."""
    x = np.concatenate([np.linspace(-13, 13, 4001), [-1e300, -40, -38, 0, 40, 1e300]])
    wanted = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    with np.errstate(all="raise", under="ignore", over="ignore"):
        got, bell = gelu.normal_forward(x)
        y = gelu.gelu_forward(x)[0]
    near = np.abs(x) <= 9
    assert np.abs(got[near] / wanted[near] - 1).max() < 1e-12 and np.abs(got - wanted).max() < 2e-15
    assert_equal(bell, np.exp(-(np.minimum(np.abs(x), 100) ** 2) / 2), n=1)
    assert_equal(y[:4001], (x * wanted)[:4001], n=1)
    assert y[4006] == 1e300 and abs(y[4001]) == 0
    assert 1e-5 < np.abs(gelu.gelu_tanh_forward(x[:4001])[0] - y[:4001]).max() < 1e-3


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_keep_their_width(dtype):
    """And each is the float64 result, to its own precision."""
    rng = np.random.default_rng(0)
    x, dy, w, b = (rng.standard_normal(shape).astype(dtype) for shape in ((3, 5, 8), (3, 5, 8), 8, 8))
    wide = [array.astype(np.float64) for array in (x, dy, w, b)]

    def all_of(x, dy, w, b):
        for forward, backward in (
                *((pair.forward, pair.backward) for kind, pair in ACTIVATIONS.items() if kind != "swiglu"),
                (lambda x: ops.softcap_forward(x, 2.0), lambda dy, saved: ops.softcap_backward(dy, saved, 2.0)),
                (lambda x: ops.layernorm_forward(x, w, b, 1e-5), lambda dy, saved: ops.layernorm_backward(dy, saved, w)),
                (lambda x: ops.rmsnorm_forward(x, w, 1e-5), lambda dy, saved: ops.rmsnorm_backward(dy, saved, w))):
            y, saved = forward(x)
            yield from watch.arrays_of([y, saved, backward(dy, saved)])
        yield ops.summed(dy)
    for got, wanted in zip(all_of(x, dy, w, b), all_of(*wide), strict=True):
        assert got.dtype == dtype
        assert np.abs(got - wanted).max() <= 60 * np.finfo(dtype).eps * np.abs(wanted).max()


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
