"""The n-gram baselines against a brute force that reads the text byte by byte."""
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from refpar import corpus, ngram, reading

TRAIN = [b"the cat sat on the mat", b"a", b"the dog ate the cat", b"at"]
HELD_OUT = [b"the rat sat", b"z", b"on a mat"]


def brute_probability(context: bytes, byte: int, after: dict) -> float:
    """Witten-Bell by its recursion, from a table context -> Counter of the bytes that follow."""
    shorter = brute_probability(context[1:], byte, after) if context else 1 / 256
    following = after.get(context, Counter())
    kinds = len(following)
    if not kinds:
        return shorter
    return (following[byte] + kinds * shorter) / (following.total() + kinds)


def brute_table(documents):
    after = defaultdict(Counter)
    for document in documents:
        for i in range(1, len(document)):
            for length in range(3):
                if length <= i:
                    after[document[i - length:i]][document[i]] += 1
    return after


@pytest.mark.parametrize("n", [1, 2, 3])
def test_against_brute_force(n):
    after = brute_table(TRAIN)
    expected = [brute_probability(document[max(i - n + 1, 0):i], document[i], after)
                for document in HELD_OUT for i in range(1, len(document))]
    orders = [ngram.count(corpus.lay(TRAIN), k) for k in range(1, n + 1)]
    np.testing.assert_allclose(ngram.probabilities(corpus.lay(HELD_OUT), orders), expected, rtol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("context", [b"th", b"at", b"zz", b"hz"])
def test_probabilities_sum_to_one(n, context):
    orders = [ngram.count(corpus.lay(TRAIN), k) for k in range(1, n + 1)]
    endings = corpus.lay([context + bytes([byte]) for byte in range(256)])
    assert math.isclose(ngram.probabilities(endings, orders)[1::2].sum(), 1, rel_tol=1e-12)


def test_judged_on_the_targets_of_the_held_out_windows():
    text = reading.load(None, 256)
    losses = ngram.baselines(text)
    targets = ngram.codes(text.held_out, 1)[0]
    assert targets.size == corpus.held_out(text, 256).count
    assert 5.6 > losses["unigram"] > losses["bigram"] > losses["trigram"] > 1
    assert "trigram" in ngram.described(losses) and "bits" in ngram.described(losses)


def test_a_text_too_short_for_an_order():
    short = corpus.Corpus("short", corpus.lay([b"ab"]), corpus.lay([b"abab"]))
    losses = ngram.baselines(short)
    assert losses["bigram"] == losses["trigram"] and math.isfinite(losses["unigram"])
