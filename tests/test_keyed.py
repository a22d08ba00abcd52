"""Keyed randomness: a shard is drawn alone and equals the whole, and what is drawn is as random as it should be."""
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refpar.nn import keyed
from refpar.nn.dropout import attention_dropout, dropout
from refpar.nn.seams import KEEP
from refpar.oracle.equal import assert_equal
from refpar.oracle.packed import packed

KEY = keyed.key(0, "test", "draws")


@given(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b"]), st.text(max_size=3), st.integers(0, 9)),
       st.tuples(st.integers(0, 9), st.sampled_from(["a", "b"]), st.text(max_size=3), st.integers(0, 9)))
def test_keys_differ_where_anything_differs(one, other):
    assert (keyed.key(*one) == keyed.key(*other)) == (one == other)


def test_a_key_does_not_depend_on_the_type_of_a_number():
    assert keyed.key(np.int64(3), "p", "n", np.int32(4)) == keyed.key(3, "p", "n", 4)


@pytest.mark.parametrize("draw", [keyed.bits, keyed.uniform, keyed.normal, lambda key, *parts: keyed.integers(key, 7, *parts)])
def test_a_part_is_that_part_of_the_whole_in_any_order(draw):
    rows, columns = np.arange(40)[:, None], np.arange(30)
    whole = draw(KEY, rows, columns)
    mine = np.array([7, 3, 39]), np.array([29, 0])
    assert np.array_equal(whole[np.ix_(*mine)], draw(KEY, mine[0][:, None], mine[1]))
    assert draw(KEY, rows[:0], columns).shape == (0, 30)


def test_mixing_wraps_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keyed.normal((1 << 64) - 1, np.array([-1, 2**62]), 3)


def test_no_two_elements_share_their_bits():
    assert len(np.unique(keyed.bits(KEY, np.arange(300)[:, None], np.arange(300)))) == 300 * 300


def test_each_bit_of_an_index_flips_half_of_the_bits_drawn():
    index = np.arange(2000)
    for bit in range(20):
        flipped = keyed.bits(KEY, index) ^ keyed.bits(KEY, index ^ (1 << bit))
        share = np.array([(flipped >> np.uint64(i) & np.uint64(1)).mean() for i in range(64)])
        assert np.all(np.abs(share - 0.5) < 5 * 0.5 / np.sqrt(len(index)))


def test_uniform_and_normal_have_their_moments():
    n = 200_000
    u, z = keyed.uniform(KEY, np.arange(n)), keyed.normal(KEY, np.arange(n))
    assert u.min() >= 0 and u.max() < 1 and np.isfinite(z).all()
    counts = np.histogram(u, 100, (0, 1))[0]
    assert np.sum((counts - n / 100) ** 2) / (n / 100) < 160                        # chi squared with 99 degrees: 134 is one in 100
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs((z**power).mean() - moment) < 5 * (z**power).std() / np.sqrt(n)
    assert abs((z[:-1] * z[1:]).mean()) < 5 / np.sqrt(n)                            # neighbours know nothing of each other
    assert set(np.unique(keyed.integers(KEY, 5, np.arange(1000)))) == set(range(5))


@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout_of_a_shard_is_that_of_the_whole(seed, rate):
    batch = packed(seed, 3, 8, 50, step=seed % 5)
    x = np.random.default_rng(seed).standard_normal((3, 8, 6))
    drop = dropout(rate, seed, "residual", "1.mlp")
    rows, columns = np.array([2, 0]), np.array([7, 3, 4])
    y = drop.forward(x, batch)
    assert np.array_equal(y[rows][:, columns], drop.forward(x[rows][:, columns], batch.cut(rows, columns)))
    kept = y != 0
    assert_equal(y[kept], x[kept] / (1 - rate), n=1)
    assert np.array_equal(drop.backward(np.ones_like(x), batch) != 0, kept)         # the same mask again
    assert drop.forward(x.astype(np.float32), batch).dtype == np.float32


def test_dropout_differs_by_step_layer_purpose_and_seed():
    batch, x = packed(0, 4, 16, 50), np.ones((4, 16, 32))
    masks = [dropout(0.5, *words).forward(x, batch._replace(step=step))
             for words, step in (((0, "residual", "1.mlp"), 0), ((0, "residual", "1.mlp"), 1), ((0, "residual", "2.mlp"), 0),
                                 ((0, "embedding", "1.mlp"), 0), ((1, "residual", "1.mlp"), 0))]
    for i, mask in enumerate(masks):
        assert abs((mask > 0).mean() - 0.5) < 0.06
        assert all(abs(((mask > 0) == (other > 0)).mean() - 0.5) < 0.06 for other in masks[:i])


def test_dropout_at_rate_0_is_decided_where_the_seam_is_filled():
    assert dropout(0, 0, "residual", "1.mlp") is KEEP
    assert attention_dropout(0, 0, "1.attention") is None


def test_attention_dropout_of_a_block_and_of_some_heads_is_that_of_the_whole():
    index = np.arange(2 * 9).reshape(2, 9)
    whole = attention_dropout(0.4, 3, "1.attention")(5, index, 6, index, np.float64)            # [B, H, S, S]
    part = attention_dropout(0.4, 3, "1.attention", first=2)(5, index[:, 4:], 3, index[:, 2:7], np.float64)
    assert np.array_equal(whole[:, 2:5, 4:, 2:7], part)
