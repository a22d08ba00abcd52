"""Decoding one byte at a time equals reading the whole text anew for every byte."""
import numpy as np
import pytest

from refpar import sample
from refpar.config import PRESETS
from refpar.nn.build import build
from refpar.nn.chain import forward, start
from refpar.nn.init import initial
from refpar.nn.keyed import key

PROMPT = b"the quick brown fox"


@pytest.fixture(scope="module", params=["llama-tiny", "llama-uneven", "mamba2-tiny", "mamba2-uneven", "gpt2-tiny"])
def model(request):
    config = PRESETS[request.param]
    chain = build(config)
    return chain, initial(config, chain, seed=1, dtype=np.float64, rough=True)


def logits_of(chain, params, text):
    """[S, V] of the whole text in one pass."""
    batch = sample.tokens_from(np.frombuffer(text, np.uint8), 0)
    return forward(chain, batch.tokens, params, batch, start(chain, params, batch))[0][0]


def test_greedy_decoding_equals_reading_anew(model):
    chain, params = model
    text = PROMPT
    for _ in range(12):
        text += bytes([int(logits_of(chain, params, text)[-1][:256].argmax())])
    assert sample.sample(chain, params, PROMPT, 12, temperature=0) == text[len(PROMPT):]


def test_logits_in_any_pieces_are_those_of_the_whole(model):
    chain, params = model
    whole = logits_of(chain, params, PROMPT)
    text = None
    for begin, end in ((0, 1), (1, 3), (3, 11), (11, 12), (12, len(PROMPT))):
        text = sample.read(chain, params, np.frombuffer(PROMPT[begin:end], np.uint8), text)
        np.testing.assert_allclose(text.logits, whole[end - 1], rtol=0, atol=1e-12 * np.abs(whole).max())
    assert text.length == len(PROMPT)


def test_draws_are_keyed_by_seed_and_position(model):
    chain, params = model
    drawn = sample.sample(chain, params, PROMPT, 8, seed=5)
    assert drawn == sample.sample(chain, params, PROMPT, 8, seed=5)
    assert drawn != sample.sample(chain, params, PROMPT, 8, seed=6)
    assert drawn[3:] == sample.sample(chain, params, PROMPT + drawn[:3], 5, seed=5)     # continued later


def test_picks_follow_the_softmax():
    p = np.array([0.5, 0.0, 0.3, 0.2])
    with np.errstate(divide="ignore"):
        logits = np.log(p)
    draws = key(0, "sample", "byte")
    picks = np.bincount([sample.pick(logits, 1.0, draws, position) for position in range(20_000)], minlength=4)
    assert picks[1] == 0 and np.abs(picks / 20_000 - p).max() < 0.015
    cold = [sample.pick(logits, 0.05, draws, position) for position in range(200)]
    assert np.mean(np.array(cold) == 0) > 0.95
    assert sample.pick(np.r_[np.zeros(256), 9.0], 0, draws, 0) == 0                     # token 256 is no byte


@pytest.mark.parametrize("arguments, sentence", [((b"", 3), "prompt is empty"), ((b"a", -1), "length=-1"),
                                                 ((b"a", 1, 0, -0.5), "temperature=-0.5")])
def test_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        sample.sample(None, None, *arguments)
