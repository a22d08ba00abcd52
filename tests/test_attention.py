"""Attention and rotary positions: the naive form by finite differences and by what it must not see, the fast form by the naive."""
import collections
import dataclasses
import math
from typing import NamedTuple

import numpy as np
import pytest
from derivative import assert_derivative
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import positions

from refpar import watch
from refpar.config import Model
from refpar.corpus import Batch
from refpar.nn import attention, blocks, rope
from refpar.nn.attention import EVERYTHING, Places, places
from refpar.nn.dropout import attention_dropout
from refpar.oracle.equal import assert_equal, leaves
from refpar.oracle.naive import naive_core, naive_rope

seeds = st.integers(0, 10**6)
rates = st.sampled_from([0.0, 0.0, 0.4])
windows = st.sampled_from([EVERYTHING, EVERYTHING, 1, 2, 3, 5])


class Case(NamedTuple):
    """Queries, keys, values, what lies before them, and the batch they belong to."""
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    batch: Batch
    before: dict


@st.composite
def cases(draw, longest=12, rows=st.integers(0, 3)) -> Case:
    """Empty rows and tokens, groups of one and of several heads, documents that begin anywhere, keys before the row's first."""
    rng = np.random.default_rng(draw(seeds))
    B, S, R = draw(rows), draw(st.integers(0, longest)), draw(st.integers(0, 5))
    K, g, E = draw(st.integers(1, 2)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 2))
    return case(rng, B, S, R, K, g, E, draw(st.sampled_from([0.0, 0.1, 0.6])))


def case(rng, B, S, R, K, g, E, ends, dtype=np.float64) -> Case:
    """R of R + S tokens lie before."""
    position = positions(rng, B, R + S, ends)
    names = rng.permutation(B * (R + S) + 1)                                        # of documents, in no order
    document = names[np.cumsum(position == 0, axis=1) + (R + S) * np.arange(B)[:, None]]
    index = np.arange(B * (R + S)).reshape(B, R + S)
    whole = Batch(position, position, position, document, index, step=3)
    k, v = rng.standard_normal((2, B, R + S, K, E)).astype(dtype)
    early = whole.cut(columns=slice(0, R))
    before = {"k": k[:, :R], "v": v[:, :R], **places(early)._asdict()}
    return Case(rng.standard_normal((B, S, K * g, E)).astype(dtype), k[:, R:], v[:, R:], whole.cut(columns=slice(R, R + S)), before)


def gradients_of(core, c: Case, rng):
    """One pass down and up, with a future that asks for something: outputs, gradients, and what they were drawn for."""
    out, after, saved = core.forward(c.q, c.k, c.v, c.batch, c.before)
    doutputs = {"out": rng.standard_normal(out.shape).astype(out.dtype),
                "after": {name: rng.standard_normal(after[name].shape).astype(out.dtype) for name in "kv"}}
    dq, dk, dv, dbefore = core.backward(doutputs["out"], doutputs["after"], saved, c.batch)
    return {"out": out, "after": after}, {"q": dq, "k": dk, "v": dv, "before": dbefore}, doutputs


def assert_same(c: Case, outputs, grads, expected, expected_grads):
    """Where one key alone is seen, gradients of scores are differences that leave 0: the scale is that of their addends."""
    n = max(c.q.shape[1] * c.q.shape[2], c.k.shape[1] + c.before["k"].shape[1], 1) * c.q.shape[3]
    q, k, v = (max(float(np.abs(x).max(initial=1)), 1) for x in (c.q, expected["after"]["k"], expected["after"]["v"]))
    for (name, got), (_, wanted) in zip(leaves(outputs), leaves(expected), strict=True):
        assert_equal(got, wanted, n, name=name)
    for (name, got), (_, wanted) in zip(leaves(grads), leaves(expected_grads), strict=True):
        assert_equal(got, wanted, n, scale=4 * v * max(q, k), name=f"d{name}")          # 4: the largest of dout, about


@given(cases(longest=5), rates, windows, seeds)
@settings(max_examples=40)
def test_naive_by_finite_differences(c, rate, window, seed):
    rng = np.random.default_rng(seed)
    core = naive_core(attention_dropout(rate, 0, "1.attention"), window)

    def function(x):
        out, after, _ = core.forward(x["q"], x["k"], x["v"], c.batch, c.before | x["before"])
        return {"out": out, "after": {name: after[name] for name in "kv"}}
    inputs = {"q": c.q, "k": c.k, "v": c.v, "before": {name: c.before[name] for name in "kv"}}
    _, grads, doutputs = gradients_of(core, c, rng)
    assert_derivative(function, inputs, grads, doutputs, rng)


@given(cases(), rates, windows, st.integers(1, 5), st.integers(1, 60), seeds)
def test_fast_is_naive(c, rate, window, size, elements, seed):
    """With blocks so short that a case has several, of queries and of rows."""
    drop = attention_dropout(rate, 0, "1.attention")
    with small_blocks(size, elements):
        fast, fast_grads, _ = gradients_of(blocks.core(drop, window), c, np.random.default_rng(seed))
    naive, naive_grads, _ = gradients_of(naive_core(drop, window), c, np.random.default_rng(seed))
    assert_same(c, fast, fast_grads, naive, naive_grads)


class small_blocks:
    """Blocks of so many queries and scores, inside the `with`."""

    def __init__(self, size, elements):
        self.new = {"block_size": lambda queries: size, "ELEMENTS": elements}

    def __enter__(self):
        self.old = {name: getattr(blocks, name) for name in self.new}
        vars(blocks).update(self.new)

    def __exit__(self, *_):
        vars(blocks).update(self.old)


@pytest.mark.parametrize("S, R, ends, dtype, window", [
    (150, 0, 0.0, np.float32, EVERYTHING), (130, 70, 0.02, np.float64, EVERYTHING), (600, 0, 0.005, np.float32, EVERYTHING),
    (130, 70, 0.02, np.float64, 64), (200, 0, 0.0, np.float64, 65)])
def test_fast_is_naive_at_the_blocks_own_size(S, R, ends, dtype, window):
    c = case(np.random.default_rng(S), 2, S, R, 2, 2, 16, ends, dtype)
    fast, fast_grads, _ = gradients_of(blocks.core(window=window), c, np.random.default_rng(1))
    naive, naive_grads, _ = gradients_of(naive_core(window=window), c, np.random.default_rng(1))
    assert_same(c, fast, fast_grads, naive, naive_grads)


@pytest.mark.parametrize("core_of", [naive_core, blocks.core])
@given(cases(longest=8, rows=st.just(1)), windows, st.data())
def test_what_is_not_visible_does_not_matter(core_of, c, window, data):
    """Bitwise: change the keys that a token may not see, those of other documents, of later tokens and of tokens out of its
    window, to anything."""
    if not c.q.shape[1]:
        return
    core = core_of(window=window)
    out, after, _ = core.forward(c.q, c.k, c.v, c.batch, c.before)
    i = data.draw(st.integers(0, c.q.shape[1] - 1))
    distance = c.batch.position[0, i] - after["position"][0]
    same = (after["document"][0] == c.batch.document[0, i]) & (distance >= 0) & (distance < window)
    R = c.before["k"].shape[1]
    k, v = after["k"].copy(), after["v"].copy()
    k[0, ~same], v[0, ~same] = 1e3, -1e3
    before = c.before | {"k": k[:, :R], "v": v[:, :R]}
    other, _, _ = core.forward(c.q, k[:, R:], v[:, R:], c.batch, before)
    assert np.array_equal(out[0, i], other[0, i])
    k[0, same] += 1
    v[0, same] += 1
    other, _, _ = core.forward(c.q, k[:, R:], v[:, R:], c.batch, c.before | {"k": k[:, :R], "v": v[:, :R]})
    assert not np.array_equal(out[0, i], other[0, i])


@given(cases(), rates, windows, st.data())
def test_a_row_in_segments_is_the_whole(c, rate, window, data):
    """Forward by handing on keys, backward by handing back their gradients."""
    core, S = blocks.core(attention_dropout(rate, 0, "1.attention"), window), c.q.shape[1]
    whole, whole_grads, doutputs = gradients_of(core, c, np.random.default_rng(0))
    cuts = sorted(data.draw(st.lists(st.integers(0, S), max_size=3)))
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, S])]
    before, kept, outs = c.before, [], []
    for part in parts:
        out, before, saved = core.forward(c.q[:, part], c.k[:, part], c.v[:, part], c.batch.cut(columns=part), before)
        outs.append(out)
        kept.append(saved)
    dlater, grads = doutputs["after"], []
    for part, saved in zip(reversed(parts), reversed(kept)):
        *dqkv, dlater = core.backward(doutputs["out"][:, part], dlater, saved, c.batch.cut(columns=part))
        grads.insert(0, dqkv)
    joined = dict(zip("qkv", (np.concatenate(parts, axis=1) for parts in zip(*grads)))) | {"before": dlater}
    assert_same(c, {"out": np.concatenate(outs, axis=1), "after": before}, joined, whole, whole_grads)


@given(cases(), st.data())
def test_order_and_placement_of_keys_do_not_matter(c, data):
    """Keys cut into parts anywhere, in any order: partial results merge, in any nesting, and gradients add up to the whole."""
    _, after, saved = blocks.core().forward(c.q, c.k, c.v, c.batch, c.before)
    k, v, keys, queries = after["k"], after["v"], attention.keys_of(after), places(c.batch)
    T = k.shape[1]
    order = np.array(data.draw(st.permutations(range(T))), np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, T), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, T])]
    some = [blocks.partial(c.q, k[:, part], v[:, part], queries, Places(*(x[:, part] for x in keys))) for part in parts]
    left, right = blocks.identity(c.q), blocks.identity(c.q)
    for left_part, right_part in zip(some, reversed(some)):
        left, right = blocks.merge(left, left_part), blocks.merge(right_part, right)
    n = max(T, 1) * c.q.shape[3]
    for merged in (left, right):
        assert_equal(blocks.finish(merged), saved["out"], n)
        assert_equal(merged.lse, saved["lse"], n, scale=10)
    dout = np.random.default_rng(T).standard_normal(c.q.shape)
    delta = np.vecdot(dout, saved["out"])
    dq, dk, dv = blocks.partial_backward(dout, delta, saved["lse"], c.q, k, v, queries, keys)
    scale = 10 * max(float(np.abs(x).max(initial=1)) for x in (c.q, k)) * float(np.abs(v).max(initial=1))     # of the addends
    dq_parts = np.zeros_like(dq)
    for part in parts:
        dq_part, dk_part, dv_part = blocks.partial_backward(
            dout, delta, saved["lse"], c.q, k[:, part], v[:, part], queries, Places(*(x[:, part] for x in keys)))
        dq_parts += dq_part
        assert_equal(dk_part, dk[:, part], n, scale)
        assert_equal(dv_part, dv[:, part], n, scale)
    assert_equal(dq_parts, dq, n, scale)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_query_that_sees_nothing(dtype):
    """Its average is 0, its log-sum -inf, its gradients 0, nothing is NaN or warned of; merged with more, it is the other side."""
    c = case(np.random.default_rng(0), 2, 7, 0, 1, 2, 4, 0.3, dtype)
    nobody = Places(*(np.full((2, 5), -1) for _ in range(3)))
    k = np.ones((2, 5, 1, 4), dtype)
    with np.errstate(all="raise", under="ignore"):
        blind = blocks.partial(c.q, k, k, places(c.batch), nobody)
        grads = blocks.partial_backward(c.q, np.zeros_like(blind.lse), blind.lse, c.q, k, k, places(c.batch), nobody)
        both = blocks.merge(blind, blind)
    assert not blind.out.any() and np.all(blind.lse == -np.inf) and not any(grad.any() for grad in grads)
    assert not both.out.any() and np.all(both.lse == -np.inf) and both.out.dtype == dtype
    seeing = blocks.partial(c.q, c.k, c.v, places(c.batch), places(c.batch))
    for merged in (blocks.merge(blind, seeing), blocks.merge(seeing, blind)):
        assert np.array_equal(merged.out, seeing.out) and np.array_equal(merged.lse, seeing.lse)


def test_huge_scores_stay_finite():
    c = case(np.random.default_rng(0), 1, 9, 0, 1, 1, 2, 0.0)
    big = c._replace(q=c.q * 1e4, k=c.k * 1e4)
    fast, fast_grads, _ = gradients_of(blocks.core(), big, np.random.default_rng(1))
    naive, _, _ = gradients_of(naive_core(), big, np.random.default_rng(1))
    assert all(np.isfinite(x).all() for x in (fast["out"], *(fast_grads[name] for name in "qkv")))
    assert_equal(fast["out"], naive["out"], n=10)


def test_a_rank_left_without_heads():
    c = case(np.random.default_rng(0), 2, 5, 3, 1, 1, 4, 0.3)
    for K in (0, 1):
        before = c.before | {name: c.before[name][:, :, :K] for name in "kv"}
        empty = Case(c.q[:, :, :0], c.k[:, :, :K], c.v[:, :, :K], c.batch, before)
        outputs, grads, _ = gradients_of(blocks.core(), empty, np.random.default_rng(1))
        assert outputs["out"].shape == (2, 5, 0, 4) and grads["k"].shape == (2, 5, K, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_numbers_keep_their_width(dtype, rate):
    c = case(np.random.default_rng(0), 2, 70, 5, 2, 2, 4, 0.1, dtype)
    outputs, grads, _ = gradients_of(blocks.core(attention_dropout(rate, 0, "1.attention")), c, np.random.default_rng(1))
    floats = [x for x in watch.arrays_of([outputs, grads]) if x.dtype.kind == "f"]
    assert len(floats) == 8 and {x.dtype for x in floats} == {np.dtype(dtype)}


def test_products_are_counted():
    """Of one document in one block, all pairs: 2 of 2BHSTE forward, and 5 backward with the scores once more."""
    c = case(np.random.default_rng(0), 2, 20, 0, 2, 3, 4, 0.0)
    with watch.watching(watch.Ledger()) as ledger:
        gradients_of(blocks.core(), c, np.random.default_rng(1))
    one = 2 * 2 * 6 * 20 * 20 * 4
    assert ledger.flops == {"attention scores": 2 * one} | {f"attention {name}": one for name in ("values", "dp", "dq", "dk", "dv")}


def test_keys_that_no_query_of_a_block_sees_are_not_touched():
    """256 tokens in blocks of 64: of one document the triangle of blocks, of two its half."""
    c = case(np.random.default_rng(0), 1, 256, 0, 1, 1, 4, 0.0)
    for documents, pairs in ((1, 1 + 2 + 3 + 4), (2, 1 + 2 + 1 + 2)):
        column = np.arange(256)
        batch = c.batch._replace(position=column[None] % (256 // documents), document=column[None] // (256 // documents))
        with watch.watching(watch.Ledger()) as ledger:
            blocks.core().forward(c.q, c.k, c.v, batch, c.before)
        assert ledger.flops["attention scores"] == 2 * 64 * 64 * 4 * pairs


@pytest.mark.parametrize("window, keys", [(1, 4 * 64), (2, 4 * 64 + 3), (65, 7 * 64), (66, 7 * 64 + 2), (EVERYTHING, 10 * 64)])
def test_keys_out_of_the_window_are_not_touched(window, keys):
    """One document of 256 tokens in blocks of 64: a block looks at its own 64 keys and at the window - 1 before them."""
    c = case(np.random.default_rng(0), 1, 256, 0, 1, 1, 4, 0.0)
    with watch.watching(watch.Ledger()) as ledger:
        blocks.core(window=window).forward(c.q, c.k, c.v, c.batch, c.before)
    assert ledger.flops["attention scores"] == 2 * 64 * 4 * keys


@given(seeds, st.sampled_from(sorted(rope.PAIRS)), st.integers(0, 3), st.integers(0, 6), st.integers(1, 3), st.integers(1, 4))
def test_rotary(seed, kind, rows, tokens, heads, pairs):
    rng, (forward, backward) = np.random.default_rng(seed), rope.PAIRS[kind]
    x, position = rng.standard_normal((rows, tokens, heads, 2 * pairs)), rng.integers(0, 9999, (rows, tokens))
    turn = rope.turns(position, rope.powers(2 * pairs, 500.0), x.dtype)
    y = forward(x, turn)
    assert_equal(y, naive_rope(x, position, rope.powers(2 * pairs, 500.0), kind), n=2)
    dy = rng.standard_normal(x.shape)
    assert_derivative(lambda given: forward(given["x"], turn), {"x": x}, {"x": backward(dy, turn)}, dy, rng)
    assert_equal(backward(y, turn), x, n=2)                                         # the turn back


def test_scaled_rotary_frequencies():
    """Against the definitions, written out pair by pair: some pairs of each kind in Llama 3.1's own numbers."""
    llama = Model(head_width=128, rope_base=500000.0, rope_factor=8.0)
    for kind in rope.SCALINGS:
        config = dataclasses.replace(llama, rope_scaling=kind)
        got, counted = rope.SCALINGS[kind](config), collections.Counter()
        for i in range(64):
            plain = 500000.0 ** (-2 * i / 128)
            wavelength = 2 * math.pi / plain
            if kind == "llama3":
                part = "short" if wavelength < 8192 / 4 else "long" if wavelength > 8192 / 1 else "between"
                kept = (8192 / wavelength - 1) / (4 - 1)
                wanted = {"short": plain, "long": plain / 8, "between": (1 - kept) * plain / 8 + kept * plain}[part]
                counted[part] += 1
            else:
                wanted = {"none": plain, "linear": plain / 8, "ntk": (500000.0 * 8 ** (128 / 126)) ** (-2 * i / 128)}[kind]
            assert_equal(got[i], wanted, n=1)
        assert kind != "llama3" or min(counted.values()) > 3 and len(counted) == 3
        assert kind not in ("ntk", "llama3") or got[0] == 1                         # the first pair turns as before
        assert kind == "none" or abs(got[63] / 500000.0 ** (-126 / 128) * 8 - 1) < 1e-12


def test_rotary_scores_depend_on_distance_alone():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, 8))

    def score(i, j):
        turned = (rope.rope_forward(x, rope.turns(np.array([[at]]), rope.powers(8, 100.0), x.dtype)) for x, at in ((q, i), (k, j)))
        return np.vecdot(*turned)
    assert_equal(score(17, 5), score(1012, 1000), n=8, scale=1000 * np.abs(q * k).sum())
    assert abs(score(17, 5) - score(17, 6)).max() > 1e-3


def test_rotary_in_float32_is_right_far_away():
    x = np.ones((1, 1, 1, 8), np.float32)
    far = np.array([[1_000_003]])
    y = rope.rope_forward(x, rope.turns(far, rope.powers(8, 1e4), x.dtype))
    assert y.dtype == np.float32
    assert_equal(y, naive_rope(x.astype(np.float64), far, rope.powers(8, 1e4)).astype(np.float32), n=2)
