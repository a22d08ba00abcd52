"""Cross-entropy: its definition, finite differences, ignored targets, and parts of the vocabulary that merge."""
import numpy as np
import pytest
from derivative import assert_derivative
from drawn import check
from hypothesis import given
from hypothesis import strategies as st
from strategies_loss import situations

from refpar.nn import loss as L
from refpar.nn.loss import cross_entropy_backward, cross_entropy_forward
from refpar.oracle.equal import assert_equal
from refpar.oracle.properties_loss import vocabulary_loss

seeds = st.integers(0, 10**6)


def drawn(seed, rows, tokens, vocab, ignored):
    rng = np.random.default_rng(seed)
    targets = np.where(rng.random((rows, tokens)) < ignored, -1, rng.integers(0, vocab, (rows, tokens)))
    return rng, 3 * rng.standard_normal((rows, tokens, vocab)), targets


@given(seeds, st.integers(0, 3), st.integers(0, 50), st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0]),
       st.sampled_from([0.0, 0.1, 0.9]), st.sampled_from([0.0, 0.5]))
def test_definition_and_derivative(seed, rows, tokens, vocab, ignored, smoothing, z):
    rng, logits, targets = drawn(seed, rows, tokens, vocab, ignored)
    forward, backward = L.cross_entropy(vocab, smoothing, z)
    (loss, count), saved = forward(logits, targets)
    denominator = np.exp(logits).sum(axis=2, keepdims=True)
    p = np.exp(logits) / denominator
    b, s = np.nonzero(targets >= 0)
    q = smoothing / vocab + (1 - smoothing) * np.eye(vocab)[targets[b, s]]
    losses = -(q * np.log(p[b, s])).sum(axis=1) + z * np.log(denominator[b, s, 0]) ** 2
    assert count == len(b)
    assert_equal(loss, np.sum(losses), n=max(count, 1), scale=max(float(np.abs(losses).sum()), 1))
    around = 100                                # what a loss near 0 is the difference of; a constant has no derivative
    assert_derivative(lambda x: around + forward(x["logits"], targets)[0][0], {"logits": logits},
                      {"logits": backward(1.0, saved)}, np.ones(()), rng)
    assert not backward(0.3, saved)[targets < 0].any()


@given(seeds, st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_parts_of_the_vocabulary_merge_in_any_nesting(seed, widths, smooth, z):
    vocab = sum(widths) + 1
    q = L.smoothed(0.3, vocab) if smooth else L.ONE_HOT
    _, logits, targets = drawn(seed, 1, 20, vocab, 0.3)
    logits, targets = logits[0], targets[0]
    edges = np.cumsum([0, *widths, 1])
    parts = [L.partial(logits[:, a:b], targets, a, q) for a, b in zip(edges, edges[1:])]
    left, right = parts[0], parts[-1]
    for part in parts[1:]:
        left = L.merge(left, part)
    for part in reversed(parts[:-1]):
        right = L.merge(part, right)
    (loss, count), lse = L.finish(L.partial(logits, targets, 0, q), targets, z)
    nothing = L.partial(logits[:, :0], targets, vocab, q)
    for merged in (left, right, L.merge(nothing, left), L.merge(left, nothing), L.merge(L.merge(nothing, nothing), right)):
        (other, same), other_lse = L.finish(merged, targets, z)
        assert same == count
        assert_equal(other, loss, n=20, scale=20 * np.abs(logits).max())
        assert_equal(other_lse, lse, n=vocab)
    saved = {"logits": logits, "lse": lse, "targets": targets}
    whole = cross_entropy_backward(0.7, saved, 0, q, z)
    for a, b in zip(edges, edges[1:]):
        assert_equal(cross_entropy_backward(0.7, saved | {"logits": logits[:, a:b]}, a, q, z), whole[:, a:b], n=1, scale=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_logits_and_the_width_of_numbers(dtype):
    logits = np.array([[[0, 1000, -1000], [-1e30, 0, 1e30]]], dtype)
    with np.errstate(all="raise", under="ignore"):
        (loss, count), saved = cross_entropy_forward(logits, np.array([[0, 2]]))
        dlogits = cross_entropy_backward(np.float64(0.5), saved)
    assert loss == 1000 and count == 2 and loss.dtype == dtype == dlogits.dtype
    assert np.array_equal(dlogits, np.array([[[-0.5, 0.5, 0], [0, 0, 0]]], dtype))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_keep_their_width(dtype):
    _, logits, targets = drawn(0, 2, 70, 4, 0.3)
    forward, backward = L.cross_entropy(4, 0.1, 0.1)
    (loss, _), saved = forward(logits.astype(dtype), targets)
    assert loss.dtype == saved["lse"].dtype == backward(np.float64(0.1), saved).dtype == dtype


def test_a_word_that_cannot_be_costs_nothing():
    """Without smoothing a logit may be -inf: words that only fill the table up."""
    logits = np.array([[[1.0, 2.0, -np.inf]]])
    forward, backward = L.cross_entropy(3, 0.0, 0.1)
    (loss, _), saved = forward(logits, np.array([[1]]))
    assert np.isfinite(loss) and backward(1.0, saved)[0, 0, 2] == 0


@pytest.mark.parametrize("rows, tokens, ignored", [(0, 5, 0.0), (2, 0, 0.0), (2, 5, 1.0)])
def test_nothing_to_predict(rows, tokens, ignored):
    _, logits, targets = drawn(0, rows, tokens, 4, ignored)
    (loss, count), saved = cross_entropy_forward(logits, targets)
    assert loss == 0 and count == 0 and not cross_entropy_backward(1.0, saved).any()


def test_the_loss_over_words_that_ranks_share(world):
    check(world, vocabulary_loss, situations())
