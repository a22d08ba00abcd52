"""The Mamba-1 layer: derivatives, pads, the control, shards of its channels, and what it may touch.  (The model as a whole is in
`test_properties_nn.py`.)"""
import dataclasses

import numpy as np
import pytest
from derivative import assert_derivative, drawn_like
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
    variants,
)

from refpar import watch
from refpar.config import Model
from refpar.named import parse_model
from refpar.nn.mamba1 import mamba1_layer
from refpar.nn.product import settle
from refpar.nn.seams import Pair, Seams
from refpar.oracle.naive import mamba1_recurrence

RANK = 2


def drawn(s: Sizes, dtype=np.float64, seams=Seams(), **options):
    """A layer of I = M*P channels with the weights, input, batch and past of one case."""
    model = Model(pattern=("mamba1",), blocks=1, width=5, inner=s.M * s.P, dt_rank=RANK, state=s.N, conv=s.W)
    model = dataclasses.replace(model, **options | {"norm_group": 0})
    rng, layer = np.random.default_rng(s.seed), mamba1_layer(model, seams)
    w = {name: 0.5 * rng.standard_normal(model.shape(dims)) for name, dims in layer.dims.items()}
    batch = batch_of(rng, positions(rng, s.B, s.S, s.ends))
    inputs = {"x": rng.standard_normal((s.B, s.S, model.width)), "w": w, "before": drawn_like(layer.start(w, batch), rng)}
    return rng, model, layer, cast(inputs, dtype), batch


def addends(s):
    return max(1, s.B * s.S) * max(s.M * s.P, s.N, 5)


@settings(max_examples=20)
@given(sizes(), st.booleans(), st.data())
def test_derivative_of_the_layer(s, cut, data):
    rng, _, layer, inputs, batch = drawn(s, cut=cut, **data.draw(variants(s)))
    d = drawn_like(outputs_of(layer, inputs, batch), rng)
    assert_derivative(lambda inputs: outputs_of(layer, inputs, batch), inputs, gradients_of(layer, inputs, batch, d), d, rng)


@settings(max_examples=30)
@given(sizes(), st.data())
def test_chunks_in_the_layer_are_the_recurrence(s, data):
    options = data.draw(variants(s))
    rng, _, layer, inputs, batch = drawn(s, **options)
    _, _, judge, _, _ = drawn(s, seams=Seams(scan=mamba1_recurrence()), **options)
    outputs = outputs_of(judge, inputs, batch)
    d = drawn_like(outputs, rng)
    assert_alike(outputs_of(layer, inputs, batch), outputs, addends(s))
    assert_alike(gradients_of(layer, inputs, batch, d), gradients_of(judge, inputs, batch, d), addends(s))


@settings(max_examples=40)
@given(sizes(), st.integers(0, 5), st.data())
def test_pads_are_nothing(s, pads, data):
    rng, _, layer, inputs, batch = drawn(s, **data.draw(variants(s)))
    assert_pads_are_nothing(layer, inputs, batch, rng, pads, addends(s))


@settings(max_examples=40)
@given(sizes(), st.data())
def test_the_control_sees_no_further_than_its_conv(s, data):
    """With the scan cut, a change reaches its token and W-1 more, and the state is handed on as it came."""
    _, model, layer, inputs, batch = drawn(s._replace(S=max(1, s.S), ends=0.0), cut=True)
    t = data.draw(st.integers(0, batch.tokens.shape[1] - 1))
    changed = inputs | {"x": inputs["x"].copy()}
    changed["x"][:, t] += 1
    a, b = (outputs_of(layer, case, batch) for case in (inputs, changed))
    moved = (a["y"] != b["y"]).any(axis=(0, 2))
    assert moved[t] and not moved[:t].any() and not moved[t + model.conv:].any()
    assert np.array_equal(a["after"]["state"], inputs["before"]["state"])


@settings(max_examples=30)
@given(sizes(), st.data())
def test_ranks_that_share_the_channels_are_the_layer(s, data):
    """Each rank has some of the channels, perhaps none; `over` completes the second projections and their gradients.  Outputs and
    input gradients are addends of the whole; states, their gradients and those of weights are its parts."""
    rng, model, layer, inputs, batch = drawn(s)
    d = drawn_like(outputs_of(layer, inputs, batch), rng)
    whole, grads = outputs_of(layer, inputs, batch), gradients_of(layer, inputs, batch, d)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, model.inner), max_size=2))), model.inner]
    parts = [slice(a, b) for a, b in zip(edges, edges[1:])]

    def shard(tree, part):
        return {name: weight[tuple(part if word == "I/tp" else slice(None) for word in layer.dims[name].split())]
                for name, weight in tree.items()}

    def last(tree, part):
        return {name: array[..., part] for name, array in tree.items()}

    def everywhere(run):
        """run(rank, exchange) on each rank twice: to hear each rank's addend, then with their sum."""
        told = []
        for part in parts:
            run(part, lambda addend: told.append(addend) or addend)
        return [run(part, lambda addend: sum(told)) for part in parts]

    def forward(part, exchange):
        rank = mamba1_layer(model, Seams(over=Pair(exchange, None)))
        return rank.forward(inputs["x"], shard(inputs["w"], part), batch, last(inputs["before"], part))
    saved = everywhere(forward)

    def backward(part, exchange):
        rank = mamba1_layer(model, Seams(over=Pair(None, exchange)))
        return rank.backward(d["y"], last(d["after"], part), saved[parts.index(part)][2], shard(inputs["w"], part), batch)
    results = everywhere(backward)
    total = {"y": sum(y for y, _, _ in saved), "x": sum(dx for dx, _, _ in results)}
    assert_alike(total, {"y": whole["y"], "x": grads["x"]}, addends(s))
    for part, (_, after, _), (_, dbefore, dw) in zip(parts, saved, results):
        assert_alike(after, last(whole["after"], part), addends(s))
        assert_alike(dbefore, last(grads["before"], part), addends(s))
        assert_alike(settle(dw), shard(grads["w"], part), addends(s))


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
@given(sizes(), st.booleans(), st.data())
def test_float32_stays(s, cut, data):
    _, _, layer, inputs, batch = drawn(s, np.float32, cut=cut, dt_least=0.1, dt_most=0.9, **data.draw(variants(s)))
    y, after, saved = layer.forward(inputs["x"], inputs["w"], batch, inputs["before"])
    dx, dbefore, grads = layer.backward(y, after, saved, inputs["w"], batch)
    assert {array.dtype for array in watch.arrays_of([y, after, saved, dx, dbefore, settle(grads)])} == {np.dtype(np.float32)}


@settings(max_examples=20)
@given(sizes())
def test_operations_of_the_projections(s):
    """The survey's appendix gives 4 b s d i in, 2 b s i (r + 2 n), 2 b s r i, 2 b s i d out; twice that backward."""
    _, model, layer, inputs, batch = drawn(s)
    with watch.watching(watch.Ledger()) as ledger:
        y, after, saved = layer.forward(inputs["x"], inputs["w"], batch, inputs["before"])
        settle(layer.backward(y, after, saved, inputs["w"], batch)[2])
    once = 2 * s.B * s.S * model.inner * (3 * model.width + 2 * model.dt_rank + 2 * model.state)
    assert [ledger.flops[name] for name in ("linear", "input gradient", "weight gradient")] == [once] * 3


@pytest.mark.parametrize("fields, sentence", [
    ("inner=0", "inner=0 must be a whole number"), ("dt_rank=0", "dt_rank=0 must be a whole number"),
    ("conv_act=relu", "conv_act=relu must be silu or none"), ("skip_by=row", "skip_by=row must be head or channel"),
    ("norm_group=5", "norm_group=5 must divide the 256 channels"), ("dt_least=2,dt_most=1", "below dt_most=1.0"),
    ("dt_least=-1", "dt_least=-1.0 must be at least 0"), ("norm_first=maybe", "norm_first=maybe must be of the type bool"),
    ("pattern=mamba3", "'mamba3', and a layer is attention, mlp, mamba1 or mamba2")])
def test_what_is_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_model(f"mamba2,{fields}")
