"""The Mamba-2 layer and model: derivatives, pieces, documents, pads, shards of its heads, and what it may touch."""
import dataclasses

import numpy as np
import pytest
from derivative import assert_derivative, drawn_like, paths
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import (
    Sizes,
    assert_alike,
    assert_pads_are_nothing,
    batch_of,
    cast,
    frozen,
    gradients_of,
    outputs_of,
    positions,
    sizes,
    split,
    variants,
)

from refpar import watch
from refpar.config import Model
from refpar.nn import chain as chains
from refpar.nn.build import build
from refpar.nn.gated_norm import gated_norm
from refpar.nn.gradient import add, loss_and_gradients, loss_of
from refpar.nn.init import initial
from refpar.nn.mamba2 import mamba2_layer, mix
from refpar.nn.product import settle
from refpar.nn.seams import ALONE, Pair, Seams
from refpar.nn.ssm import softplus_backward, softplus_forward, time_step
from refpar.oracle.equal import assert_equal
from refpar.oracle.naive import mamba2_recurrence

TINY = Model(pattern=("mamba2",), blocks=2, vocab=7, width=6, ssm_heads=4, ssm_head_width=3, groups=2, state=3, conv=3, chunk=4,
             norm_eps=0.1)


def model_of(s: Sizes) -> Model:
    return Model(pattern=("mamba2",), blocks=1, width=5, ssm_heads=s.M, ssm_head_width=s.P, groups=s.G, state=s.N, conv=s.W,
                 chunk=s.L, norm_eps=0.1)


def drawn(s, dtype=np.float64, **options):
    """A layer with the weights, input, batch and past of one case; norms and biases are away from 1 and 0."""
    config = dataclasses.replace(model_of(s), **options)
    rng, layer = np.random.default_rng(s.seed), mamba2_layer(config, Seams())
    w = {name: 0.5 * rng.standard_normal(config.shape(dims)) for name, dims in layer.dims.items()}
    batch = batch_of(rng, positions(rng, s.B, s.S, s.ends))
    before = drawn_like(layer.start(w, batch), rng)
    inputs = {"x": rng.standard_normal((s.B, s.S, config.width)), "w": w, "before": before}
    return rng, config, layer, cast(inputs, dtype), batch


def addends(s):
    return max(1, s.B * s.S) * max(s.M * s.P, s.G * s.N, 5)


# ---------------------------------------------------------------------------------------------------------------- derivatives

@settings(max_examples=20)
@given(sizes(), st.booleans(), st.data())
def test_derivative_of_the_layer(s, cut, data):
    """With every variant, and with respect to what lies before the first token too."""
    rng, _, layer, inputs, batch = drawn(s, cut=cut, **data.draw(variants(s)))
    d = drawn_like(outputs_of(layer, inputs, batch), rng)
    assert_derivative(lambda inputs: outputs_of(layer, inputs, batch), inputs, gradients_of(layer, inputs, batch, d), d, rng)


@pytest.mark.parametrize("tied", [False, True])
def test_derivative_of_the_model(tied):
    rng = np.random.default_rng(5)
    config = dataclasses.replace(TINY, tied=tied)
    chain = build(config)
    params = initial(config, chain, 0, np.float64, rough=True)
    batch = batch_of(rng, positions(rng, 2, 11, 0.2), config.vocab)
    _, grads = loss_and_gradients(chain, params, batch, 1)
    assert_derivative(lambda params: np.array(loss_of(chain, params, batch)[0]), params, grads, np.ones(()), rng)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_softplus(dtype):
    """log(1 + exp(x)) and the sigmoid, far to both sides too, to the last digits."""
    x = np.array([-80, -30, -1, 0, 1e-3, 19.9, 20.1, 80], dtype)
    with np.errstate(over="raise"):
        y, saved = softplus_forward(x)
        slope = softplus_backward(np.ones_like(x), saved)
    wide = x.astype(np.longdouble)
    for got, exact in ((y, np.log1p(np.exp(wide))), (slope, 1 / (1 + np.exp(-wide)))):
        assert got.dtype == dtype
        for a, b in zip(got, exact.astype(dtype)):
            assert_equal(a, b, 1)                                                   # each by its own magnitude


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_time_step(dtype):
    """softplus between its limits; beyond them, and at a pad, it does not move with dt."""
    step = time_step(Model(dt_least=0.1, dt_most=2.0))
    dt, position = np.array([[[-1.0, -9.0, 0.5, 9.0], [1.0, 1.0, 1.0, 1.0]]], dtype), np.array([[3, -1]])
    y, saved = step.forward(dt, np.array([0.5, 0, 0, 0], dtype), position)
    slope = step.backward(np.ones_like(y), saved)
    assert y.dtype == slope.dtype == dtype
    assert_equal(y, np.array([[[np.log1p(np.exp(-0.5)), 0.1, np.log1p(np.exp(0.5)), 2], [0] * 4]], dtype), 1)
    assert_equal(slope, np.array([[[1 / (1 + np.exp(0.5)), 0, 1 / (1 + np.exp(-0.5)), 0], [0] * 4]], dtype), 1)


# ------------------------------------------------------------------------------------------------------------ same, otherwise

@settings(max_examples=30)
@given(sizes(), st.data())
def test_chunks_in_the_layer_are_the_recurrence(s, data):
    rng, config, layer, inputs, batch = drawn(s, **data.draw(variants(s)))
    judge = mamba2_layer(config, Seams(mix=mix(config, ALONE, mamba2_recurrence())))
    outputs = outputs_of(judge, inputs, batch)
    d = drawn_like(outputs, rng)
    assert_alike(outputs_of(layer, inputs, batch), outputs, addends(s))
    assert_alike(gradients_of(layer, inputs, batch, d), gradients_of(judge, inputs, batch, d), addends(s))


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 11), max_size=4).map(sorted), st.sampled_from([1, 2]))
def test_pieces_of_the_model_are_the_whole(seed, cuts, rows):
    """A row read in pieces, each continuing what the one before left; backward from the last.  Pieces of 0, 1 and 2 tokens are
    shorter than the conv."""
    rng, chain = np.random.default_rng(seed), build(TINY)
    params = initial(TINY, chain, seed, np.float64, rough=True)
    batch = batch_of(rng, positions(rng, rows, 11, 0.2), TINY.vocab)
    begin = chains.start(chain, params, batch)
    y, after, saved = chains.forward(chain, batch.tokens, params, batch, begin)
    dy, dafter = rng.standard_normal(y.shape), drawn_like(after, rng)
    _, dbefore, products = chains.backward(chain, dy, saved, params, batch, dafter)
    grads = chains.gradients(chain, products)

    pieces, before, ys, runs = split(batch, cuts), begin, [], []
    for piece in pieces:
        y_piece, before, kept = chains.forward(chain, piece.tokens, params, piece, before)
        ys.append(y_piece)
        runs.append(kept)
    edges = np.cumsum([0, *(piece.tokens.shape[1] for piece in pieces)])
    total, back = None, dafter
    for i in reversed(range(len(pieces))):
        _, back, products = chains.backward(chain, dy[:, edges[i]:edges[i + 1]], runs[i], params, pieces[i], back)
        mine = chains.gradients(chain, products)
        total = mine if total is None else add(total, mine)
    assert_equal(np.concatenate(ys, axis=1), y, 40, scale=max(1, np.abs(y).max()))
    for got, expected in ((before, after), (back, dbefore), (total, grads)):
        assert_alike(got, expected, 11 * rows * 12)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([1, 3]))
def test_a_document_of_the_model_does_not_see_its_neighbour(seed, rows):
    """Bitwise, whatever stands before it, pads or another text; the conv's biases are not 0."""
    rng, chain = np.random.default_rng(seed), build(TINY)
    params = initial(TINY, chain, seed, np.float64, rough=True)
    position = np.concatenate([np.tile(np.arange(rng.integers(1, 6)), (rows, 1)), np.tile(np.arange(6), (rows, 1))], axis=1)
    begin = position.shape[1] - 6
    batch = batch_of(rng, position, TINY.vocab)
    answers = []
    for tokens in (batch.tokens, np.where(np.arange(position.shape[1]) < begin, (batch.tokens + 1) % TINY.vocab, batch.tokens)):
        case = batch._replace(tokens=tokens)
        past = drawn_like(chains.start(chain, params, case), rng)
        y, after, saved = chains.forward(chain, tokens, params, case, past)
        dy = np.where(np.arange(position.shape[1])[:, None] < begin, 0, np.cos(y))
        _, back, _ = chains.backward(chain, dy, saved, params, case, drawn_like(after, np.random.default_rng(seed)))
        answers.append([y[:, begin:], *(array for _, array in paths(after))])
        assert not any(array.any() for _, array in paths(back))      # no gradient flows into the past
    assert all(np.array_equal(a, b) for a, b in zip(*answers))

    alone = batch.cut(columns=slice(begin, position.shape[1]))
    y, after, _ = chains.forward(chain, alone.tokens, params, alone, chains.start(chain, params, alone))
    assert_equal(answers[0][0], y, 40, scale=max(1, np.abs(y).max()))


@settings(max_examples=40)
@given(sizes(), st.integers(0, 5), st.data())
def test_pads_are_nothing(s, pads, data):
    """One row and more; before, between and behind the tokens; a conv's bias makes no input of them, no step decays the state."""
    rng, _, layer, inputs, batch = drawn(s, **data.draw(variants(s)))
    assert_pads_are_nothing(layer, inputs, batch, rng, pads, addends(s))


@settings(max_examples=40)
@given(sizes(), st.data())
def test_the_control_sees_no_further_than_its_conv(s, data):
    """With the scan cut, a change reaches its token and W-1 more, and the state is handed on as it came."""
    _, config, layer, inputs, batch = drawn(s._replace(S=max(1, s.S), ends=0.0), cut=True)
    t = data.draw(st.integers(0, batch.tokens.shape[1] - 1))
    changed = inputs | {"x": inputs["x"].copy()}
    changed["x"][:, t] += 1
    a, b = (outputs_of(layer, case, batch) for case in (inputs, changed))
    moved = (a["y"] != b["y"]).any(axis=(0, 2))
    assert moved[t] and not moved[:t].any() and not moved[t + config.conv:].any()
    assert np.array_equal(a["after"]["state"], inputs["before"]["state"])


# ---------------------------------------------------------------------------------------------------------------------- shards

STATES = {"conv_x": "B W MP/tp", "conv_B": "B W GN/tp", "conv_C": "B W GN/tp", "state": "B M/tp P N"}


def shard(config, tree, dims, groups: slice):
    """The part of weights or states that belongs to some whole groups."""
    each = {"M": config.ssm_heads // config.groups, "GN": config.state}
    each["MP"] = each["M"] * config.ssm_head_width

    def cut(word):
        if not word.endswith("/tp"):
            return slice(None)
        size = each[word.removesuffix("/tp")]
        return slice(groups.start * size, groups.stop * size)
    return {name: array[tuple(cut(word) for word in dims[name].split())] for name, array in tree.items()}


@settings(max_examples=40)
@given(sizes(), st.data())
def test_shards_of_whole_groups_add_up(s, data):
    """The layer takes its sizes from its weights: run on each part of the groups, outputs and input gradients are addends of the
    whole, and weight gradients its parts."""
    rng, config, layer, inputs, batch = drawn(s)
    d = drawn_like(outputs_of(layer, inputs, batch), rng)
    whole, grads = outputs_of(layer, inputs, batch), gradients_of(layer, inputs, batch, d)
    edges = sorted({0, s.G, *data.draw(st.sets(st.integers(0, s.G), max_size=2))})
    y, dx = np.zeros_like(whole["y"]), np.zeros_like(inputs["x"])
    for a, b in zip(edges, edges[1:]):
        def mine(tree, dims, part=slice(a, b)):
            return shard(config, tree, dims, part)
        case = {"x": inputs["x"], "w": mine(inputs["w"], layer.dims), "before": mine(inputs["before"], STATES)}
        outputs = outputs_of(layer, case, batch)
        got = gradients_of(layer, case, batch, {"y": d["y"], "after": mine(d["after"], STATES)})
        y += outputs["y"]
        dx += got["x"]
        assert_alike(outputs["after"], mine(whole["after"], STATES), addends(s))
        assert_alike(got["w"], mine(grads["w"], layer.dims), addends(s))
        assert_alike(got["before"], mine(grads["before"], STATES), addends(s))
    assert_alike({"y": y, "x": dx}, {"y": whole["y"], "x": grads["x"]}, addends(s))


# ------------------------------------------------------------------------------------------------------------------ gated norm

def norm_inputs(rng, groups, each, rows=2, tokens=3):
    """Groups of different scale."""
    y, z = (rng.standard_normal((rows, tokens, groups * each)) for _ in "yz")
    y *= np.repeat(3.0 ** np.arange(groups), each)
    return {"y": y, "z": z, "w": rng.standard_normal(groups * each)}


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_gated_norm_is_each_group_s_own(seed, groups, each, first):
    rng, norm = np.random.default_rng(seed), gated_norm(first)
    inputs = norm_inputs(rng, groups, each)
    lengths = [each] * groups
    y, saved = norm.forward(*inputs.values(), lengths, each, 0.1)
    gate = inputs["z"] / (1 + np.exp(-inputs["z"]))
    gated = inputs["y"] if first else inputs["y"] * gate
    for g in range(groups):
        part = gated[..., g * each:(g + 1) * each]
        expected = part / np.sqrt((part ** 2).mean(-1, keepdims=True) + 0.1) * inputs["w"][g * each:(g + 1) * each]
        expected = expected * gate[..., g * each:(g + 1) * each] if first else expected
        assert_equal(y[..., g * each:(g + 1) * each], expected, each)
    dy = rng.standard_normal(y.shape)
    grads = dict(zip(("y", "z", "w"), norm.backward(dy, saved, inputs["w"], lengths, each)))
    assert_derivative(lambda inputs: {"": norm.forward(*inputs.values(), lengths, each, 0.1)[0]}, inputs, grads, {"": dy}, rng)


@given(st.integers(0, 10**6), st.lists(st.integers(1, 3), min_size=2, max_size=4), st.booleans())
def test_ranks_that_share_a_group_complete_its_statistic(seed, widths, first):
    """One group cut over several ranks: `over` sums the statistic, and the gradient of the scale."""
    rng, norm = np.random.default_rng(seed), gated_norm(first)
    inputs = norm_inputs(rng, 1, sum(widths))
    width = sum(widths)
    whole, saved = norm.forward(*inputs.values(), [width], width, 0.1)
    dy = rng.standard_normal(whole.shape)
    expected = norm.backward(dy, saved, inputs["w"], [width], width)
    edges = np.cumsum([0, *widths])
    parts = [slice(a, b) for a, b in zip(edges, edges[1:])]
    ranks = range(len(parts))

    def here(rank):
        return [widths[rank]]
    mine = [{name: array[..., part] for name, array in inputs.items()} for part in parts]

    def everywhere(run):
        """run(rank, exchange) on each rank twice: to hear each rank's addend, then with their sum."""
        told = []
        for rank in ranks:
            run(rank, lambda addend: told.append(addend) or addend)
        return [run(rank, lambda addend: sum(told)) for rank in ranks]

    forward = everywhere(lambda rank, exchange: norm.forward(
        *mine[rank].values(), here(rank), width, 0.1, Pair(exchange, None)))
    assert_equal(np.concatenate([y for y, _ in forward], axis=2), whole, sum(widths))
    backward = everywhere(lambda rank, exchange: norm.backward(
        dy[..., parts[rank]], forward[rank][1], mine[rank]["w"], here(rank), width, Pair(None, exchange)))
    for got, grad in zip(zip(*backward), expected):
        assert_equal(np.concatenate(got, axis=grad.ndim - 1), grad, sum(widths) * 6, scale=max(1, np.abs(grad).max()))


# ------------------------------------------------------------------------------------------------------ what it may touch

@settings(max_examples=20)
@given(sizes(), st.booleans())
def test_it_writes_to_nothing_it_was_given_and_saves_no_parameter(s, cut):
    rng, _, layer, inputs, batch = drawn(s, cut=cut)
    frozen(inputs)
    y, after, saved = layer.forward(inputs["x"], inputs["w"], batch, inputs["before"])
    frozen([y, after, saved])
    assert not any(np.shares_memory(array, weight) for array in watch.arrays_of(saved) for weight in inputs["w"].values())
    d = frozen(drawn_like({"y": y, "after": after}, rng))
    layer.backward(d["y"], d["after"], saved, inputs["w"], batch)


@settings(max_examples=20)
@given(sizes(), st.booleans())
def test_float32_stays(s, cut):
    _, _, layer, inputs, batch = drawn(s, np.float32, cut=cut)
    y, after, saved = layer.forward(inputs["x"], inputs["w"], batch, inputs["before"])
    dx, dbefore, grads = layer.backward(y, after, saved, inputs["w"], batch)
    assert {array.dtype for array in watch.arrays_of([y, after, dx, dbefore, settle(grads)])} == {np.dtype(np.float32)}
    assert layer.start(inputs["w"], batch)["state"].dtype == np.float32


@settings(max_examples=20)
@given(sizes())
def test_operations_of_the_projections(s):
    """2 b s d (2 MP + 2 GN + M) in and 2 b s MP d out; twice that backward."""
    _, config, layer, inputs, batch = drawn(s)
    with watch.watching(watch.Ledger()) as ledger:
        y, after, saved = layer.forward(inputs["x"], inputs["w"], batch, inputs["before"])
        settle(layer.backward(y, after, saved, inputs["w"], batch)[2])
    once = 2 * s.B * s.S * config.width * (2 * s.M * s.P + 2 * s.G * s.N + s.M + s.M * s.P)
    assert [ledger.flops[name] for name in ("linear", "input gradient", "weight gradient")] == [once] * 3
