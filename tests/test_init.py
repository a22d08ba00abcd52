"""Initial weights: a shard is drawn alone, and each parameter is spread as its rule says."""
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.config import PRESETS, share
from refpar.nn.build import build
from refpar.nn.init import initial, inverse_softplus
from refpar.nn.ssm import softplus_forward
from refpar.oracle.equal import assert_equal, leaves

BIASES = [f"{name}_bias" for name in ("norm", "q", "k", "v", "o", "up", "down")]
FAMILIES = ("llama-uneven", "mamba1-uneven", "mamba2-uneven", "gpt2-uneven", "hybrid-uneven")


@given(st.sampled_from(FAMILIES), st.integers(1, 12), st.integers(0, 11), st.booleans(), st.sampled_from([np.float32, np.float64]))
@settings(max_examples=20)
def test_a_shard_drawn_alone_is_that_part_of_the_whole(family, ranks, rank, rough, dtype):
    config, rank = dataclasses.replace(PRESETS[family], blocks=1), rank % ranks
    chain = build(config)

    def cut(name, dims):
        assert name.count(".") == 2
        return tuple(share(*(config.dim(word)[0], ranks, rank, config.dim(word)[1])) if "/tp" in word else slice(None)
                     for word in dims.split())
    whole, part = initial(config, chain, 3, dtype, None, rough), initial(config, chain, 3, dtype, cut, rough)
    for layer, dims in chain.dims().items():
        for name, text in dims.items():
            assert np.array_equal(part[layer][name], whole[layer][name][cut(f"{layer}.{name}", text)])
            assert part[layer][name].dtype == dtype and whole[layer][name].shape == config.shape(text)


def test_layers_parameters_and_seeds_are_drawn_apart():
    config = PRESETS["llama-tiny"]
    params = [initial(config, build(config), seed, np.float64) for seed in (0, 1)]
    drawn = [w.ravel()[:5] for tree in params for _, w in leaves(tree) if w.ndim > 1]
    assert len({tuple(w) for w in drawn}) == len(drawn)
    names = [w for tree in (params[0], initial(config, build(config), 0, np.float64)) for _, w in leaves(tree)]
    half = len(names) // 2
    assert all(np.array_equal(a, b) for a, b in zip(names[:half], names[half:]))


@pytest.mark.parametrize("family", ["llama", "mamba2", "gpt2"])
def test_spread(family):
    config = PRESETS[family]
    params = initial(config, build(config), 0, np.float64)
    branches, taps = len(config.pattern) * config.blocks, 1 / np.sqrt(config.conv)
    for full, w in leaves(params):
        name = full.split(".")[2]
        low, high = ({"norm": (1, 1), "gate_norm": (1, 1), "skip": (1, 1), "A_log": (0, np.log(16)), "dt_bias": (-7, -2.2),
                      "bias_x": (0, 0), "bias_B": (0, 0), "bias_C": (0, 0)}
                     | dict.fromkeys(BIASES, (0, 0))).get(name, (-taps, taps) if "conv" in name else (-1, 1))
        assert low <= w.min() and w.max() <= high, full
        if w.ndim > 1 and "conv" not in name:
            deviation = 0.02 / np.sqrt(branches) if name in ("o", "down", "out") else 0.02
            assert abs(w.std() / deviation - 1) < 5 / np.sqrt(2 * w.size) and abs(w.mean()) < 5 * deviation / np.sqrt(w.size), full
        if name == "dt_bias":
            steps = softplus_forward(w)[0]
            assert 1e-3 <= steps.min() and steps.max() <= 1e-1


@pytest.mark.parametrize("family", FAMILIES)
def test_rough_weights_hide_nothing(family):
    """No parameter is constant, and no norm, bias or skip is at its 1 or 0."""
    config = PRESETS[family]
    for name, w in leaves(initial(config, build(config), 0, np.float64, rough=True)):
        assert len(np.unique(w)) == w.size and not np.isin(w, (0, 1)).any(), name


def test_inverse_softplus():
    y = np.array([1e-12, 1e-3, 1, 50])
    assert_equal(softplus_forward(inverse_softplus(y))[0][1:], y[1:], n=1)


@pytest.mark.parametrize("config", [PRESETS[name] for name in FAMILIES] + [dataclasses.replace(PRESETS["llama-uneven"], tied=True)])
def test_the_parameters_of_the_matrices_are_foretold(config):
    shapes = [config.shape(dims) for group in build(config).dims().values() for dims in group.values()]
    assert config.numbers == sum(np.prod(shape) for shape in shapes if len(shape) > 1)
