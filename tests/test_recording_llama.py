"""Our Llama-like model is what PyTorch recorded; `recordings/record_llama.py` made the file."""
from pathlib import Path

import numpy as np
import pytest

from refpar.config import Model, Training
from refpar.corpus import Batch
from refpar.nn import chain as chains
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients
from refpar.nn.optimizer import clipped, squared, updated
from refpar.oracle.equal import assert_equal, compare, leaves

RECORDED = np.load(Path(__file__).with_name("recordings") / "llama.npz")
SIZES = dict(blocks=2, vocab=13, width=7, heads=4, kv_heads=2, head_width=4, ffn=5, rope_base=50.0, norm_eps=1e-4)
TRAINING = Training(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=0.5, dtype="float64")
N = RECORDED["tokens"].size * SIZES["vocab"]


def recorded(kind: str) -> dict:
    """"tied/weights" -> layer -> parameter -> array."""
    tree = {}
    for name in RECORDED.files:
        if name.startswith(f"{kind}/"):
            layer, parameter = name.removeprefix(f"{kind}/").rsplit(".", 1)
            tree.setdefault(layer, {})[parameter] = RECORDED[name]
    return tree


def recorded_batch() -> Batch:
    position = RECORDED["position"]
    document, index = np.cumsum(position == 0, axis=1), np.arange(position.size).reshape(position.shape)
    return Batch(RECORDED["tokens"], RECORDED["targets"], position, document, index)


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_it_is_what_pytorch_recorded(name):
    """Logits, loss, every gradient and its norm, and the weights after three AdamW steps."""
    chain, batch = build(Model(tied=name == "tied", **SIZES)), recorded_batch()
    weights = {layer: {} for layer, _ in chain.layers} | recorded(f"{name}/weights")
    logits, _, _ = chains.forward(chain, batch.tokens, weights, batch, chains.start(chain, weights, batch))
    assert_equal(logits, RECORDED[f"{name}/logits"], N)

    zeros = [{layer: {key: np.zeros_like(w) for key, w in group.items()} for layer, group in weights.items()} for _ in "mv"]
    state = weights, *zeros, 0
    for step, (loss, norm) in enumerate(zip(RECORDED[f"{name}/losses"], RECORDED[f"{name}/norms"])):
        own_loss, grads = loss_and_gradients(chain, state[0], batch, batch.count)
        if step == 0:
            assert max(compare(grads, {layer: {} for layer in grads} | recorded(f"{name}/gradients"), N).values()) <= 1
        own_norm = np.sqrt(sum(squared(grad) for _, grad in leaves(grads)))
        assert_equal(own_loss / batch.count, loss, N)
        assert_equal(own_norm, norm, N)
        state = updated(state[0], clipped(grads, own_norm, TRAINING.clip), *state[1:], TRAINING.rate, TRAINING)
    assert max(compare(state[0], {layer: {} for layer in state[0]} | recorded(f"{name}/after"), N).values()) <= 1
