"""The layers and the whole Llama-like model: derivatives, pieces of a row, documents, causality, shards, and what it may touch."""
import dataclasses

import numpy as np
import pytest
from derivative import assert_derivative, drawn_like
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar import watch
from refpar.config import PRESETS, Model, share
from refpar.oracle.packed import packed
from refpar.nn import chain as chains
from refpar.nn.build import build, plain
from refpar.nn.dropout import attention_dropout
from refpar.nn.gradient import add, loss_and_gradients, loss_of
from refpar.nn.init import initial
from refpar.nn.mlp import mlp_layer
from refpar.nn.pieces import norm_of
from refpar.nn.product import settle
from refpar.nn.residual import residual
from refpar.nn.seams import KEEP, Pair, Seams
from refpar.nn.transformer import (
    attention_layer,
    embedding_layer,
    head_layer,
    norm_layer,
    tied_head_layer,
)
from refpar.oracle.equal import assert_equal, leaves
from refpar.oracle.naive import naive_core

seeds = st.integers(0, 10**6)
TINY = Model(blocks=2, vocab=11, width=6, heads=4, kv_heads=2, head_width=4, ffn=7, norm_eps=0.1)
GPT2 = dataclasses.replace(TINY, norm="layer", positions="learned", longest=19, attention_bias="all", mlp="gelu_tanh", mlp_bias=True)
VARIANTS = {                                    # each option of the Transformer at least once, and beside others
    "llama": TINY,
    "gpt2": GPT2,
    "qwen": dataclasses.replace(TINY, qk_norm=True, rope_pairs="halves", attention_bias="qkv", rope_scaling="ntk", rope_factor=3.0),
    "mistral": dataclasses.replace(TINY, window=3, mlp_bias=True, rope_scaling="linear", rope_factor=2.0),
    "none": dataclasses.replace(GPT2, positions="none", mlp="gelu", window=2, qk_norm=True, softcap=2.0),
    "llama3": dataclasses.replace(TINY, rope_scaling="llama3", rope_factor=4.0, rope_original=20, softcap=1.5, attention_bias="all"),
}
variants = st.sampled_from(sorted(VARIANTS))
LAYERS = {"attention": attention_layer, "mlp": mlp_layer, "norm": norm_layer, "head": head_layer, "tied head": tied_head_layer,
          "embedding": embedding_layer}


def batch_of(seed, rows=2, tokens=9, vocab=11, **options):
    return packed(seed, rows, tokens, vocab, (5, 1, 9, 2), (0.3, 0.0), **options)


def model_of(config: Model, seed=0, dtype=np.float64):
    chain = build(config, seed)
    return chain, initial(config, chain, seed, dtype, rough=True)


def on_the_stream(config, kind):
    """The layer as it stands in the chain, with norm and output bias."""
    if kind in ("attention", "mlp"):
        return residual(LAYERS[kind](config, Seams()), Seams(), norm_of(config))
    return LAYERS[kind](config, Seams())


@given(st.sampled_from(sorted(LAYERS)), variants, seeds, st.integers(0, 2), st.integers(0, 7), st.integers(0, 4))
@settings(max_examples=150)
def test_layers_by_finite_differences(kind, variant, seed, rows, tokens, early):
    """Keys before the row's first among them."""
    rng, layer = np.random.default_rng(seed), on_the_stream(VARIANTS[variant], kind)
    w = {name: 0.5 * rng.standard_normal(VARIANTS[variant].shape(dims)) for name, dims in layer.dims.items()}
    whole = batch_of(seed, rows, early + tokens)
    first, batch = whole.cut(columns=slice(0, early)), whole.cut(columns=slice(early, early + tokens))
    inputs = {"x": rng.standard_normal((rows, tokens, 6)), "w": w}
    before = layer.start(w, batch)
    if kind == "attention":
        _, before, _ = layer.forward(rng.standard_normal((rows, early, 6)), w, first, layer.start(w, first))
        inputs["before"] = {name: before[name] for name in "kv"}
    if kind == "embedding":
        del inputs["x"]

    def function(given):
        y, after, _ = layer.forward(given.get("x", batch.tokens), given["w"], batch, before and before | given["before"])
        return {"y": y} | ({"after": {name: after[name] for name in "kv"}} if after else {})
    doutputs = drawn_like(function(inputs), rng)
    _, _, saved = layer.forward(inputs.get("x", batch.tokens), w, batch, before)
    dx, dbefore, grads = layer.backward(doutputs["y"], doutputs.get("after"), saved, w, batch)
    given = {"x": dx, "w": {name: settle(grads)[name] for name in w}, "before": dbefore}
    assert_derivative(function, inputs, {name: given[name] for name in inputs}, doutputs, rng)
    assert (dx is None) == (kind == "embedding")


@pytest.mark.parametrize("options", [
    {}, {"tied": True}, {"dropout": 0.3}, {"cut": True}, {"kv_heads": 1, "tied": True, "dropout": 0.1},
    {"smoothing": 0.2, "z_loss": 0.3}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_by_finite_differences(options, variant):
    chain, params = model_of(dataclasses.replace(VARIANTS[variant], **options))
    batch, rng = batch_of(1, 3, step=4), np.random.default_rng(0)
    loss, grads = loss_and_gradients(chain, params, batch, 1)
    assert_derivative(lambda params: np.asarray(loss_of(chain, params, batch)[0]), params, grads, np.ones(()), rng)
    assert loss == loss_of(chain, params, batch)[0]


def test_cut_leaves_attention_out():
    """Then a token's logits depend on itself alone."""
    chain, params = model_of(dataclasses.replace(TINY, cut=True))
    assert params["1.attention"] == {} and "q" in model_of(TINY)[1]["1.attention"]
    batch = batch_of(0)
    changed = batch._replace(tokens=np.where(np.arange(9) == 4, 0, batch.tokens))
    one, other = (logits_of(chain, params, b) for b in (batch, changed))
    assert np.array_equal(np.delete(one, 4, axis=1), np.delete(other, 4, axis=1))


def logits_of(chain, params, batch):
    return chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))[0]


@pytest.mark.parametrize("config", [dataclasses.replace(PRESETS["llama-uneven"], blocks=1, dropout=0.2),
                                    dataclasses.replace(PRESETS["llama-tiny"], blocks=2),
                                    dataclasses.replace(PRESETS["gpt2-tiny"], blocks=2, window=70)])
def test_fast_attention_is_naive_in_the_model(config):
    def naive(name, kind):
        return plain(config)(name, kind)._replace(core=naive_core(attention_dropout(config.dropout, 0, name), config.reach))
    chain, params = model_of(config)
    batch = batch_of(0, 2, 130, config.vocab)
    one = loss_and_gradients(chain, params, batch, batch.count)
    other = loss_and_gradients(build(config, 0, naive), params, batch, batch.count)
    assert_equal(one[0], other[0], n=260)
    largest = {layer: max(np.abs(grad).max() for grad in group.values()) for layer, group in other[1].items() if group}
    for (name, got), (_, wanted) in zip(leaves(one[1]), leaves(other[1]), strict=True):
        layer = name.rpartition(".")[0]     # a key's bias moves all scores of a query alike: its gradient is 0, of the layer's addends
        assert_equal(got, wanted, n=260, scale=largest[layer], name=name)


@given(seeds, variants, st.lists(st.integers(0, 9), max_size=3), st.sampled_from([0.0, 0.3]))
@settings(max_examples=40)
def test_a_row_in_segments_is_the_whole(seed, variant, cuts, rate):
    """Down with `after` handed on, up with `dbefore` handed back: the same logits, input gradients and gradients."""
    chain, params = model_of(dataclasses.replace(VARIANTS[variant], dropout=rate), seed)
    batch, start = batch_of(seed), [0, *sorted(cuts)]
    parts = [batch.cut(columns=slice(a, b)) for a, b in zip(start, [*start[1:], 9])]
    whole, after, saved = chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))
    dlogits = np.random.default_rng(seed).standard_normal(whole.shape)
    none = {name: None if x is None else {key: 0 * x[key] for key in "kv"} for name, x in after.items()}
    _, _, grads = chains.backward(chain, dlogits, saved, params, batch, none)
    grads = chains.gradients(chain, grads)

    before, kept, logits = chains.start(chain, params, parts[0]), [], []
    for part in parts:
        y, before, saved = chains.forward(chain, part.tokens, params, part, before)
        logits.append(y)
        kept.append(saved)
    assert_equal(np.concatenate(logits, axis=1), whole, n=18)
    dlater, total, end = none, None, 9
    for part, saved in zip(reversed(parts), reversed(kept)):
        begin = end - part.tokens.shape[1]
        _, dlater, some = chains.backward(chain, dlogits[:, begin:end], saved, params, part, dlater)
        some, end = chains.gradients(chain, some), begin
        total = some if total is None else add(total, some)
    for (name, got), (_, wanted) in zip(leaves(total), leaves(grads), strict=True):
        assert_equal(got, wanted, n=18 * 11, scale=max(1, np.abs(wanted).max()), name=name)


@given(seeds, variants, st.integers(0, 8))
@settings(max_examples=40)
def test_documents_and_the_future_do_not_matter(seed, variant, i):
    """Bitwise: other tokens in other documents and later ones leave a token's logits as they are, and in one block those out of
    its window."""
    config = dataclasses.replace(VARIANTS[variant], blocks=1)
    chain, params = model_of(config, seed)
    batch = batch_of(seed, rows=1)
    distance = batch.position[0, i] - batch.position
    seen = (batch.document == batch.document[0, i]) & (distance >= 0) & (distance < config.reach)
    assert seen[0, i]
    one = logits_of(chain, params, batch)
    other = logits_of(chain, params, batch._replace(tokens=np.where(seen, batch.tokens, (batch.tokens + 1) % 11)))
    assert np.array_equal(one[0, i], other[0, i])
    other = logits_of(chain, params, batch._replace(tokens=np.where(seen, (batch.tokens + 1) % 11, batch.tokens)))
    assert not np.array_equal(one[0, i], other[0, i])


@given(seeds, variants, st.permutations(range(9)))
@settings(max_examples=30)
def test_the_order_of_a_row_does_not_matter(seed, variant, order):
    """Tokens in any order, with their five arrays: everything is a function of these and of nothing local."""
    chain, params = model_of(dataclasses.replace(VARIANTS[variant], dropout=0.2), seed)
    batch = batch_of(seed, step=2)
    whole, grads = logits_of(chain, params, batch), loss_and_gradients(chain, params, batch, 5)
    shuffled = batch.cut(columns=np.array(order))
    assert_equal(logits_of(chain, params, shuffled), whole[:, order], n=18)
    other = loss_and_gradients(chain, params, shuffled, 5)
    for (name, got), (_, wanted) in zip(leaves(other[1]), leaves(grads[1]), strict=True):
        assert_equal(got, wanted, n=18 * 11, scale=max(1, np.abs(wanted).max()), name=name)


@pytest.mark.parametrize("rows, tokens", [(0, 5), (2, 0), (1, 1)])
def test_empty_batches_have_zero_gradients_of_the_right_shape(rows, tokens):
    chain, params = model_of(TINY)
    batch = batch_of(0, 2, 5).cut(slice(0, rows), slice(0, tokens))
    loss, grads = loss_and_gradients(chain, params, batch, 3)
    weights = dict(leaves(params))
    assert len(dict(leaves(grads))) == len(weights)
    for name, grad in leaves(grads):
        assert grad.shape == weights[name].shape and (rows * tokens or not grad.any()), name
    assert rows * tokens or loss == 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("options", [{}, {"tied": True, "dropout": 0.3, "smoothing": 0.1, "z_loss": 0.1}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_keep_their_width(dtype, options, variant):
    chain, params = model_of(dataclasses.replace(VARIANTS[variant], longest=70, **options), dtype=dtype)
    batch = batch_of(0, 2, 70)
    logits, after, saved = chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))
    (loss, _), kept = chain.loss.forward(logits, batch.targets)
    dlogits = chain.loss.backward(np.float64(0.1), kept)
    future = {name: None if x is None else {key: 0 * x[key] for key in "kv"} for name, x in after.items()}
    _, dbefore, products = chains.backward(chain, dlogits, saved, params, batch, future)
    grads = chains.gradients(chain, products)
    found = {x.dtype for x in watch.arrays_of([logits, after, saved, kept, dlogits, dbefore, grads]) if x.dtype.kind == "f"}
    assert found == {np.dtype(dtype)} and loss.dtype == dtype


def freeze(tree):
    for array in watch.arrays_of(tree):
        array.flags.writeable = False


@pytest.mark.parametrize("options", [{}, {"tied": True, "dropout": 0.3, "smoothing": 0.1}])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_given_is_written_to(options, variant):
    """Law 8: freeze the weights, the batch, and whatever a layer hands over."""
    chain, params = model_of(dataclasses.replace(VARIANTS[variant], longest=70, **options))
    batch = batch_of(0, 2, 70)
    x, before, kept, after = batch.tokens, chains.start(chain, params, batch), {}, {}
    freeze([params, *batch[:5], before])
    for name, layer in chain.layers:
        x, after[name], kept[name] = layer.forward(x, chain.weights(params, name), batch, before[name])
        freeze([x, after[name], kept[name]])
    _, saved = chain.loss.forward(x, batch.targets)
    freeze(saved)
    dx = chain.loss.backward(1.0, saved)
    for name, layer in reversed(chain.layers):
        freeze(dx)
        future = None if after[name] is None else {key: np.ones_like(after[name][key]) for key in "kv"}
        freeze(future)
        dx, _, grads = layer.backward(dx, future, kept[name], chain.weights(params, name), batch)
        freeze(grads)
        settle(grads)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_holds_no_parameter(variant):
    chain, params = model_of(VARIANTS[variant])
    batch = batch_of(0)
    _, _, saved = chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))
    for array in watch.arrays_of(saved):
        assert not any(np.shares_memory(array, w) for w in watch.arrays_of(params))


@given(seeds, variants, st.integers(1, 5), st.sampled_from(["attention", "mlp", "embedding", "head", "tied head"]))
@settings(max_examples=100)
def test_a_shard_of_the_weights_is_an_addend(seed, variant, ranks, kind):
    """Heads, F or words cut over ranks, more ranks than there are of them too: outputs and input gradients add up (the logits of
    the head stand side by side), and a shard's gradient is the shard of the gradient; of what no rank cuts, an addend of it."""
    config = dataclasses.replace(VARIANTS[variant], heads=6, kv_heads=3)
    config = dataclasses.replace(config, positions="rope" if kind == "embedding" else config.positions)
    rng, batch = np.random.default_rng(seed), batch_of(seed)
    layer = LAYERS[kind](config, Seams())
    w = {name: 0.5 * rng.standard_normal(config.shape(dims)) for name, dims in layer.inside.items()}
    x = batch.tokens if kind == "embedding" else rng.standard_normal((2, 9, 6))
    y, after, saved = layer.forward(x, w, batch, layer.start(w, batch))
    dy = rng.standard_normal(y.shape)
    dx, _, grads = layer.backward(dy, after and {key: 0 * after[key] for key in "kv"}, saved, w, batch)
    grads, ys, dxs = settle(grads), [], []
    shared = {name: [] for name, dims in layer.inside.items() if "/tp" not in dims}
    for rank in range(ranks):
        cuts = {name: tuple(cut_of(config, word, ranks, rank) for word in dims.split()) for name, dims in layer.inside.items()}
        part, words = {name: w[name][cuts[name]] for name in w}, cut_of(config, "V/tp", ranks, rank)
        mine = LAYERS[kind](config, Seams(first=words.start))
        y_part, after, saved = mine.forward(x, part, batch, mine.start(part, batch))
        dy_part = dy[..., words] if "head" in kind else dy
        dx_part, _, some = mine.backward(dy_part, after and {key: 0 * after[key] for key in "kv"}, saved, part, batch)
        ys.append(y_part)
        dxs.append(dx_part)
        for name, grad in settle(some).items():
            if name in shared:
                shared[name].append(grad)
                continue
            assert_equal(grad, grads[name][cuts[name]], n=18 * 11, scale=max(1, np.abs(grads[name]).max()), name=name)
    for name, addends in shared.items():
        assert_equal(sum(addends), grads[name], n=18 * 11 * 6, scale=max(1, np.abs(addends).max()), name=name)
    assert_equal(np.concatenate(ys, axis=2) if "head" in kind else sum(ys), y, n=30, scale=max(1, np.abs(y).max()))
    if kind != "embedding":
        assert_equal(sum(dxs), dx, n=66, scale=max(1, np.abs(dx).max()))


@pytest.mark.parametrize("kind, outside", [("attention", "o_bias"), ("mlp", "down_bias"), ("embedding", "position")])
def test_what_stands_outside_the_seams_is_added_once(kind, outside):
    """Two ranks with the same addend: `leave` doubles what comes from inside, and not the bias or the positions."""
    twice = Pair(lambda y, batch: y + y, lambda dy, batch: dy + dy)
    batch, rng = batch_of(0), np.random.default_rng(0)
    config = dataclasses.replace(GPT2, blocks=1)
    chain, params = model_of(config)
    name = {"embedding": "0.embedding", "attention": "1.attention", "mlp": "2.mlp"}[kind]
    w, x = params[name], batch.tokens if kind == "embedding" else rng.standard_normal((2, 9, 6))

    def run(leave, bias):
        layer = dict(build(config, 0, lambda name, kind: Seams(leave=leave)).layers)[name]
        given = w | {outside: w[outside] * bias}
        y, after, saved = layer.forward(x, given, batch, layer.start(given, batch))
        grads = layer.backward(np.ones_like(y), after and {key: 0 * after[key] for key in "kv"}, saved, given, batch)[2]
        return y, grads[outside]
    (with_bias, grad), (without, _) = run(twice, 1), run(twice, 0)
    (alone, grad_alone), (bare, _) = run(KEEP, 1), run(KEEP, 0)
    assert_equal(with_bias - without, alone - bare, n=10)
    assert_equal(grad, grad_alone, n=18)
    assert_equal(without, 2 * bare - (0 if kind == "embedding" else x), n=30)


def cut_of(config, word, ranks, rank):
    """Query heads are cut in whole groups, each with the key head that it shares."""
    size, unit = config.dim(word)
    unit *= config.heads // config.kv_heads if word == "HE/tp" else 1
    return share(size, ranks, rank, unit) if "/tp" in word else slice(None)


def test_names_and_dims():
    chain, params = model_of(dataclasses.replace(TINY, blocks=1, tied=True))
    assert [name for name, _ in chain.layers] == ["0.embedding", "1.attention", "2.mlp", "3.norm", "4.head"]
    assert chain.ties == {("4.head", "table"): ("0.embedding", "table")}
    assert chain.dims() == {
        "0.embedding": {"table": "V/tp D"},
        "1.attention": {"q": "D HE/tp", "k": "D KE/tp", "v": "D KE/tp", "o": "HE/tp D", "norm": "D"},
        "2.mlp": {"gate_up": "2 D F/tp", "down": "F/tp D", "norm": "D"}, "3.norm": {"norm": "D"}, "4.head": {}}
    assert {name: list(group) for name, group in params.items()} == {name: list(group) for name, group in chain.dims().items()}


def test_names_and_dims_of_the_variants():
    chain, _ = model_of(dataclasses.replace(GPT2, blocks=1, tied=True))
    norm = {"norm": "D", "norm_bias": "D"}
    assert chain.dims() == {
        "0.embedding": {"table": "V/tp D", "position": "X D"},
        "1.attention": {"q": "D HE/tp", "q_bias": "HE/tp", "k": "D KE/tp", "k_bias": "KE/tp", "v": "D KE/tp", "v_bias": "KE/tp",
                        "o": "HE/tp D", "o_bias": "D"} | norm,
        "2.mlp": {"up": "D F/tp", "up_bias": "F/tp", "down": "F/tp D", "down_bias": "D"} | norm, "3.norm": norm, "4.head": {}}
    outside = [layer.outside for _, layer in chain.layers]
    assert outside == [{"position": "X D"}, {"o_bias": "D"} | norm, {"down_bias": "D"} | norm, norm, {}]
    qwen = model_of(VARIANTS["qwen"])[0].layers[1][1]
    assert qwen.inside["q_norm"] == qwen.inside["k_norm"] == "E" and list(qwen.outside) == ["norm"]
    mlp = model_of(VARIANTS["mistral"])[0].layers[2][1]
    assert mlp.inside == {"gate_up": "2 D F/tp", "gate_bias": "F/tp", "up_bias": "F/tp", "down": "F/tp D"}


@given(seeds, st.sampled_from(sorted(VARIANTS)), st.integers(1, 3), st.data())
@settings(max_examples=40)
def test_padding_is_a_no_op_wherever_it_stands(seed, variant, rows, data):
    """Pads, left, right or in the middle of a row, are documents of their own without targets: they change no loss and no
    gradient, and the other tokens' logits not by a bit more than the order of a sum."""
    chain, params = model_of(VARIANTS[variant], seed)
    batch = batch_of(seed, rows)
    places = data.draw(st.lists(st.integers(0, 9), max_size=4))
    padded = padded_at(batch, places)
    kept = np.delete(np.arange(9 + len(places)), np.flatnonzero(padded.document[0] >= PAD))
    assert_equal(logits_of(chain, params, padded)[:, kept], logits_of(chain, params, batch), n=18)
    loss, grads = loss_and_gradients(chain, params, padded, 5)
    wanted_loss, wanted = loss_and_gradients(chain, params, batch, 5)
    assert_equal(loss, wanted_loss, n=18 * 11, scale=100)
    for (name, got), (_, grad) in zip(leaves(grads), leaves(wanted), strict=True):
        assert_equal(got, grad, n=18 * 11, scale=max(1, np.abs(grad).max()), name=name)


PAD = 10**6


def padded_at(batch, places):
    """A pad before each of these columns, each a document of its own, of some word and no target."""
    def insert(array, values):
        return np.insert(array, places, values, axis=1)
    ids = PAD + np.arange(len(places))
    return batch._replace(tokens=insert(batch.tokens, 3), targets=insert(batch.targets, -1), position=insert(batch.position, 0),
                          document=insert(batch.document, ids), index=insert(batch.index, ids))


@pytest.mark.parametrize("variant", VARIANTS)
def test_documents_are_isolated_both_ways(variant):
    """Perturb one document: the others' logits, and the gradients of the others' vectors, stay bitwise as they were."""
    config = VARIANTS[variant]
    chain, params = model_of(config)
    batch = packed(0, 2, 12, 11, (4, 3, 5))
    mine = batch.document == batch.document[0, 5]
    changed = batch._replace(tokens=np.where(mine, (batch.tokens + 3) % 11, batch.tokens))

    def both(batch):
        with watch.watching(Vectors()) as vectors:
            loss_and_gradients(chain, params, batch, 1)
        return [logits_of(chain, params, batch), *vectors.gradients]
    for one, other in zip(both(batch), both(changed), strict=True):
        assert np.array_equal(one[~mine], other[~mine]) and not np.array_equal(one[mine], other[mine])


class Vectors(watch.Observer):
    """Keeps the gradients of the residual stream."""

    def __init__(self):
        self.gradients = []

    def value(self, name, array):
        if name.startswith("d ") and array is not None:
            self.gradients.append(array)


@pytest.mark.parametrize("variant", VARIANTS)
def test_linear_products_are_6_n_tokens(variant):
    """Forward 2, backward 4, of every weight that multiplies, for each token."""
    chain, params = model_of(VARIANTS[variant])
    batch = batch_of(0)
    with watch.watching(watch.Ledger()) as ledger:
        loss_and_gradients(chain, params, batch, 1)
    weights = sum(w.size for layer, group in params.items() for w in group.values() if w.ndim > 1 and layer != "0.embedding")
    assert sum(n for name, n in ledger.flops.items() if not name.startswith("attention")) == 6 * weights * batch.tokens.size
