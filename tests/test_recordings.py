"""The models are what PyTorch recorded: logits, loss, every gradient and its norm, and the weights after three AdamW steps.

The scripts `recordings/record_*.py`, which know nothing of refpar, made the files.
"""
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from derivative import paths

from refpar.config import Model, Training
from refpar.corpus import Batch
from refpar.nn import chain as chains
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients
from refpar.nn.optimizer import clipped, squared, updated
from refpar.oracle.equal import assert_equal

LLAMA = dict(blocks=2, vocab=13, width=7, heads=4, kv_heads=2, head_width=4, ffn=5, rope_base=50.0, norm_eps=1e-4)
MAMBA2 = dict(pattern=("mamba2",), blocks=2, vocab=17, width=10, ssm_heads=6, ssm_head_width=3, groups=2, state=4, conv=3,
              norm_eps=1e-4)
OTHERWISE = dict(norm_first=True, norm_group=9, skip_by="channel", conv_act="none", conv_bias=False, dt_bias=False, dt_least=0.5,
                 dt_most=1.0)
MAMBA1 = dict(pattern=("mamba1",), blocks=2, vocab=17, width=10, inner=9, dt_rank=3, state=4, conv=3, norm_eps=1e-4)
GPT2 = dict(blocks=2, vocab=13, width=7, heads=4, kv_heads=4, head_width=4, ffn=9, longest=16, norm_eps=1e-4, norm="layer",
            attention_bias="all", mlp_bias=True)
OTHER = dict(mlp="gelu", qk_norm=True, rope_pairs="halves", rope_base=50.0, window=4, softcap=3.0, smoothing=0.1, z_loss=0.05)
TRAINING = Training(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=0.5, dtype="float64")

LARGE_EPS = replace(TRAINING, eps=1e-3)

CASES = {                                       # file, what its names begin with, our model
    "gpt2": ("gpt2", "gpt2/", Model(mlp="gelu_tanh", positions="learned", tied=True, **GPT2)),
    "gpt2, other options": ("gpt2", "other/", Model(**OTHER, **GPT2)),
    "llama": ("llama", "untied/", Model(**LLAMA)),
    "llama, tied": ("llama", "tied/", Model(tied=True, **LLAMA)),
    "mamba1": ("mamba1", "", Model(**MAMBA1)),
    "mamba2, in chunks": ("mamba2", "", Model(chunk=5, **MAMBA2)),
    "mamba2, every option otherwise": ("mamba2", "otherwise/", Model(chunk=5, **MAMBA2, **OTHERWISE)),
    "mamba2, in one chunk": ("mamba2", "", Model(chunk=64, **MAMBA2)),
}


def nest(file, begin: str, layers) -> dict:
    """"weights/1.mamba2.z" -> {"1.mamba2": {"z": array}}, with a place for each layer, also one without parameters."""
    tree = {layer: {} for layer in layers}
    for name in file.files:
        if name.startswith(begin):
            layer, parameter = name.removeprefix(begin).rsplit(".", 1)
            tree[layer][parameter] = file[name]
    return tree


def assert_alike(got: dict, expected: dict, n: int):
    """Two nests of the same names, each array within its own bound, but a key's bias within that of its layer: its gradient is a
    sum that cancels, for it moves all scores of a query alike."""
    got, expected = dict(paths(got)), dict(paths(expected))
    assert got.keys() == expected.keys()
    for path in got:
        scale = np.abs(expected[path[0], "q"]).max() if path[1] == "k_bias" else None
        assert_equal(got[path], expected[path], n, scale, name=".".join(path))


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_pytorch_recorded(case):
    name, begin, model = CASES[case]
    training = LARGE_EPS if name == "gpt2" else TRAINING
    file, chain = np.load(Path(__file__).with_name("recordings") / f"{name}.npz"), build(model)
    layers = [layer for layer, _ in chain.layers]
    position = file["position"]
    batch = Batch(file["tokens"], file["targets"], position, np.cumsum(position == 0, axis=1),
                  np.arange(position.size).reshape(position.shape))
    n = position.size * model.vocab

    weights = nest(file, f"{begin}weights/", layers)
    logits, _, _ = chains.forward(chain, batch.tokens, weights, batch, chains.start(chain, weights, batch))
    assert_equal(logits, file[f"{begin}logits"], n)
    m, v = ({layer: {name: np.zeros_like(w) for name, w in group.items()} for layer, group in weights.items()} for _ in "mv")
    state = weights, m, v, 0
    for step, (loss, norm) in enumerate(zip(file[f"{begin}losses"], file[f"{begin}norms"])):
        own_loss, grads = loss_and_gradients(chain, state[0], batch, batch.count)
        if step == 0:
            assert_alike(grads, nest(file, f"{begin}gradients/", layers), n)
        own_norm = np.sqrt(sum(squared(grad) for _, grad in paths(grads)))
        assert_equal(own_loss / batch.count, loss, n)
        assert_equal(own_norm, norm, n)
        state = updated(state[0], clipped(grads, own_norm, training.clip), *state[1:], training.rate, training)
    assert_alike(state[0], nest(file, f"{begin}after/", layers), n)
