"""SGD and AdamW against their formulas written plainly, and clipping."""
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.config import Training
from refpar.nn import optimizer
from refpar.nn.optimizer import adamw, clip_factor, clipped, sgd, squared, updated
from refpar.oracle.equal import assert_equal, compare

TRAINING = Training(decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6)


def plain_adamw(w, grads, rate, training):
    """Loshchilov and Hutter 2019, algorithm 2, from the first step on."""
    m = v = np.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m = training.beta1 * m + (1 - training.beta1) * g
        v = training.beta2 * v + (1 - training.beta2) * g**2
        m_hat, v_hat = m / (1 - training.beta1**t), v / (1 - training.beta2**t)
        w = w - rate * (m_hat / (np.sqrt(v_hat) + training.eps) + (training.decay * w if w.ndim > 1 else 0))
    return w, m, v


@given(st.integers(0, 10**6), st.sampled_from([(), (0,), (7,), (3, 5), (2, 3, 4)]), st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=40)
def test_adamw(seed, shape, steps, block):
    rng = np.random.default_rng(seed)
    w, grads = rng.standard_normal(shape), rng.standard_normal((steps, *shape))
    expected, whole = plain_adamw(w, grads, 0.01, TRAINING), optimizer.BLOCK
    state = w, np.zeros_like(w), np.zeros_like(w)
    optimizer.BLOCK = block
    try:
        for count, g in enumerate(grads, 1):
            state = adamw(state[0], g, *state[1:], count, 0.01, TRAINING)
    finally:
        optimizer.BLOCK = whole
    for got, wanted in zip(state, expected):
        assert_equal(got, wanted, n=steps)


def test_a_block_at_a_time_is_elementwise():
    rng = np.random.default_rng(0)
    w, g, m = rng.standard_normal((3, 5 * optimizer.BLOCK // 2)).astype(np.float32)
    whole = adamw(w, g, m, m * m, 3, 0.01, TRAINING)
    part = adamw(*(x[10:90] for x in (w, g, m, m * m)), 3, 0.01, TRAINING)
    for a, b in zip(whole, part):
        assert a.dtype == np.float32 and np.array_equal(a[10:90], b)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_trees(name):
    """Every parameter moves by its own rule; arguments are not written to; one dim does not decay."""
    training = dataclasses.replace(TRAINING, optimizer=name)
    rng = np.random.default_rng(0)
    trees = [{"1.mlp": {"down": rng.standard_normal((3, 4)), "norm": rng.standard_normal(4)}} for _ in range(3)]
    trees.append({"1.mlp": {key: x**2 for key, x in trees[2]["1.mlp"].items()}})
    for tree in trees:
        for array in tree["1.mlp"].values():
            array.flags.writeable = False
    params, m, v, step = updated(*trees, 4, 0.01, training)
    assert step == 5
    for key in ("down", "norm"):
        w, g, m_old, v_old = (tree["1.mlp"][key] for tree in trees)
        if name == "sgd":
            assert m is trees[2] and v is trees[3]
            assert_equal(params["1.mlp"][key], sgd(w, g, 0.01, training), n=1)
            assert_equal(params["1.mlp"][key], w - 0.01 * (g + (0.1 * w if key == "down" else 0)), n=1)
        else:
            for got, wanted in zip((params, m, v), adamw(w, g, m_old, v_old, 5, 0.01, training)):
                assert np.array_equal(got["1.mlp"][key], wanted)


@given(st.floats(0.01, 100), st.integers(0, 1000))
def test_clipping(clip, seed):
    rng = np.random.default_rng(seed)
    grads = {"0.a": {"w": rng.standard_normal((3, 4)), "b": rng.standard_normal(4)}, "1.b": {"w": rng.standard_normal(5)}}
    norm = np.sqrt(sum(squared(grad) for group in grads.values() for grad in group.values()))
    assert_equal(norm, np.linalg.norm(np.concatenate([g.ravel() for group in grads.values() for g in group.values()])), n=21)
    cut = clipped(grads, norm, clip)
    after = np.sqrt(sum(squared(grad) for group in cut.values() for grad in group.values()))
    assert after <= min(norm, clip) * (1 + 1e-12) and after >= min(norm, clip) * 0.999
    wanted = {layer: {name: grad * clip_factor(norm, clip) for name, grad in group.items()} for layer, group in grads.items()}
    assert max(compare(cut, wanted, 1).values()) == 0
    assert clipped(grads, norm, 0) is grads and clipped(grads, norm, 1e9) is grads
