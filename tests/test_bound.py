"""The bound through a step: nothing within the gradients' bound leaves it, and a fault does."""
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.config import Training
from refpar.nn.optimizer import clipped, squared, updated
from refpar.oracle.bound import clip_bounds, distance_within, gradient_bounds, largest_update, step_bounds
from refpar.oracle.equal import leaves

TRAINING = Training(rate=0.01, clip=0.5, dtype="float64")
N = 64


class State(NamedTuple):
    params: dict
    m: dict
    v: dict
    step: int = 0


def fresh(rng, dtype=np.float64) -> State:
    params = {"1.mlp": {"down": rng.standard_normal((5, 4)).astype(dtype), "norm": rng.standard_normal(6).astype(dtype)}}
    zeros = {"1.mlp": {name: np.zeros_like(array) for name, array in params["1.mlp"].items()}}
    return State(params, zeros, zeros)


def gradients(rng, state: State) -> dict:
    """Of very different magnitudes, with some zeros among them."""
    def draw(p):
        return (rng.standard_normal(p.shape) * 10.0 ** rng.integers(-14, 1, p.shape) * (rng.random(p.shape) < 0.9)).astype(p.dtype)
    return each(draw, state.params)


def each(function, *trees):
    return {layer: {name: function(*(tree[layer][name] for tree in trees)) for name in trees[0][layer]} for layer in trees[0]}


def take_step(state: State, grads: dict, training: Training) -> State:
    norm = sum(squared(g) for _, g in leaves(grads)) ** 0.5
    return State(*updated(state.params, clipped(grads, norm, training.clip), state.m, state.v, state.step, training.rate, training))


def furthest(a: State, b: State, limits) -> dict[str, float]:
    """store.parameter -> the largest difference in units of its bound."""
    found = {}
    for store, limit in zip(("params", "m", "v"), limits):
        for (name, here), (_, there), (_, most) in zip(leaves(getattr(a, store)), leaves(getattr(b, store)), leaves(limit)):
            found[f"{store}.{name.rpartition('.')[2]}"] = distance_within(here, there, most)
    return found


def perturbed(rng, g, d):
    """g, off by d at most: by all of it in one direction or in drawn ones, or by drawn parts."""
    part = rng.choice([-1, 1]) if rng.random() < 0.3 else rng.choice([-1, 1, rng.uniform(-1, 1)], g.shape)
    off = (g + 0.999 * d * part).astype(g.dtype)
    return np.where(np.abs(off.astype(float) - g) <= d, off, g)                 # in float32 the sum may round beyond


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), optimizer=st.sampled_from(["adamw", "sgd"]), clip=st.sampled_from([0.0, 0.5, 50.0]),
       dtype=st.sampled_from(["float32", "float64"]), steps=st.integers(1, 5), wide=st.sampled_from([1, 1e3, 1e6]))
def test_nothing_within_the_gradients_bound_leaves_it(seed, optimizer, clip, dtype, steps, wide):
    """Two runs from the same state, each step's gradients off by up to the bound (wider ones too), by drawn parts of it or all."""
    rng = np.random.default_rng(seed)
    training = replace(TRAINING, optimizer=optimizer, clip=clip, dtype=dtype)
    here = there = fresh(rng, np.dtype(dtype))
    bounds = None
    for _ in range(steps):
        grads = gradients(rng, here)
        dg = each(lambda d: d * wide, gradient_bounds(grads, N))
        off = each(lambda g, d: perturbed(rng, g, d), grads, dg)
        bounds = step_bounds(here, grads, dg, training.rate, training, bounds)
        here, there = take_step(here, grads, training), take_step(there, off, training)
        assert all(far <= 1 for far in furthest(there, here, bounds).values()), furthest(there, here, bounds)


def off_by_one_gradient(grads):
    """Gradients of size 1, so that each stands far out of its error."""
    return each(lambda g: np.where(g >= 0, 1.0, -1.0) + 0.1 * np.tanh(g), grads)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("fault, seen", [
    (lambda grads, training: (each(lambda g: 2 * g, grads), training), ("m.down", "v.norm")),
    (lambda grads, training: (each(lambda g: g * (1 + 1e-9), grads), training), ("m.down", "v.norm")),
    (lambda grads, training: (grads, replace(training, decay=0)), ("params.down",)),
    (lambda grads, training: (grads, replace(training, rate=1.001 * training.rate)), ("params.down", "params.norm")),
    (lambda grads, training: (grads, replace(training, beta2=0.951)), ("params.down", "v.norm")),
    (lambda grads, training: (each(lambda g: g * 0.5, grads), training), ("m.norm",))])
def test_faults_are_outside(optimizer, fault, seen):
    """The second step of two: the first has filled m and v."""
    rng = np.random.default_rng(1)
    training = replace(TRAINING, optimizer=optimizer, clip=0.0)
    state = take_step(fresh(rng), off_by_one_gradient(gradients(rng, fresh(rng))), training)
    grads = off_by_one_gradient(gradients(rng, state))
    limits = step_bounds(state, grads, gradient_bounds(grads, N), training.rate, training)
    right = take_step(state, grads, training)
    assert max(furthest(right, right, limits).values()) == 0
    far = furthest(take_step(state, *fault(grads, training)), right, limits)
    if optimizer == "sgd":              # which has no moments: the weights tell, but for a beta
        seen = ("params.down",) if training.beta2 == fault(grads, training)[1].beta2 else ()
    assert all(far[name] > 100 for name in seen), far


def test_a_missing_clip_is_outside():
    rng = np.random.default_rng(2)
    state = fresh(rng)
    grads = off_by_one_gradient(gradients(rng, state))
    limits = step_bounds(state, grads, gradient_bounds(grads, N), TRAINING.rate, TRAINING)
    far = furthest(take_step(state, grads, replace(TRAINING, clip=0.0)), take_step(state, grads, TRAINING), limits)
    assert far["m.down"] > 1e6 and far["v.norm"] > 1e6


def test_the_bound_is_tight_where_gradients_stand_out():
    """About the derivative: rate times the relative error of the gradient, and a few roundings of the weight."""
    rng = np.random.default_rng(3)
    state = fresh(rng)
    grads = off_by_one_gradient(gradients(rng, state))
    limit = step_bounds(state, grads, each(lambda g: 1e-6, grads), 0.01, replace(TRAINING, clip=0.0))[0]["1.mlp"]["down"]
    assert np.all(limit < 0.01 * 1e-6 * 3) and np.all(limit > 0.01 * 1e-6)


def test_a_gradient_within_its_own_error_moves_a_weight_by_a_step():
    state = State(*({"w": {"norm": np.zeros(1)}} for _ in range(3)))
    limit = step_bounds(state, {"w": {"norm": np.array([1e-20])}}, {"w": {"norm": 1e-15}}, 0.01, TRAINING)[0]["w"]["norm"]
    assert 1e-10 < limit[0] <= 0.0201


def test_largest_update():
    """The gradients that attain it, g_i = a_i / c_i, and many that do not."""
    rng = np.random.default_rng(4)
    b1, b2 = 0.9, 0.95
    for step in range(6):
        back = np.arange(step, -1, -1.0)
        for g in [(b1 / b2) ** back, *rng.standard_normal((50, step + 1))]:
            m = ((1 - b1) * b1**back * g).sum() / (1 - b1 ** (step + 1))
            v = ((1 - b2) * b2**back * g**2).sum() / (1 - b2 ** (step + 1))
            assert abs(m) / np.sqrt(v) <= largest_update(step, b1, b2) * (1 + 1e-12)
        g = (b1 / b2) ** back
        attained = (b1**back * g).sum() * (1 - b1) / (1 - b1 ** (step + 1)) / np.sqrt(
            (b2**back * g**2).sum() * (1 - b2) / (1 - b2 ** (step + 1)))
        assert attained == pytest.approx(largest_update(step, b1, b2))


def test_zero_gradients_clip_to_zero():
    grads = {"w": {"norm": np.zeros(3)}}
    clipped_grads, limits = clip_bounds(grads, gradient_bounds(grads, N), 0.5)
    assert np.all(clipped_grads["w"]["norm"] == 0) and np.all(np.isfinite(limits["w"]["norm"]))
