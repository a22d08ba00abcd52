"""Properties of the single process: plain functions property(world, situation), each on the first batch of a drawn situation.

They need no second implementation of the model: a text is changed, cut, padded, or run by the naive forms, and what must not move
is compared.  The world runs them on one rank, so that a fault planted on ranks is in all that they see.  Everything but the
situation is drawn from its seed.
"""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from refpar.config import share
from refpar.corpus import Batch
from refpar.nn import mamba2
from refpar.nn import chain as chains
from refpar.nn.build import build, plain
from refpar.nn.chain import Chain
from refpar.nn.dropout import attention_dropout
from refpar.nn.gradient import add
from refpar.nn.init import initial
from refpar.nn.seams import Seams
from refpar.oracle import naive as judges
from refpar.oracle.derivative import assert_derivative, paths
from refpar.oracle.equal import distance
from refpar.oracle.situation import Situation

SMOOTH = 0.1            # the norm's eps for finite differences: without it a norm of little is bent too sharply
LIMITS = dict(dt_least=0.0, dt_most=0.0)       # and no time step that a difference could push over its limit


class Case(NamedTuple):
    """What a property works on: a model with rough weights, a batch, and randomness of the situation's own."""
    chain: Chain
    params: dict
    batch: Batch
    rng: np.random.Generator
    dtype: np.dtype
    n: int                  # the longest sum, for the bound

    def before(self, batch=None) -> dict:
        """A drawn past of each layer, in place of none."""
        return self.drawn(chains.start(self.chain, self.params, self.batch if batch is None else batch))

    def drawn(self, tree):
        """Drawn numbers in place of those of a nest; whole numbers stay."""
        if isinstance(tree, dict):
            return {name: self.drawn(part) for name, part in tree.items()}
        if tree is None or tree.dtype.kind != "f":
            return tree
        return self.rng.standard_normal(tree.shape).astype(self.dtype)


def case_of(situation: Situation, fill=None) -> Case:
    """The situation's model and first batch."""
    training = situation.training
    chain = build(situation.model, training.seed, fill)
    params = initial(situation.model, chain, training.seed, np.dtype(training.dtype), rough=True)
    return Case(chain, params, situation.batch(0), np.random.default_rng([training.seed, 7]), np.dtype(training.dtype),
                situation.longest_sum())


def down(case: Case, batch: Batch, before: dict):
    """Forward -> logits, after, saved."""
    return chains.forward(case.chain, batch.tokens, case.params, batch, before)


def up(case: Case, batch: Batch, dy, dafter: dict, saved: dict) -> tuple[dict, dict]:
    """Backward -> dbefore, gradients multiplied out."""
    _, dbefore, products = chains.backward(case.chain, dy, saved, case.params, batch, dafter)
    return dbefore, chains.gradients(case.chain, products)


def both(case: Case, batch: Batch, before: dict, dy, dafter: dict) -> dict:
    """Down and up, as one nest: logits, after, before, gradients."""
    y, after, saved = down(case, batch, before)
    dbefore, grads = up(case, batch, dy, dafter, saved)
    return {"logits": y, "after": after, "before": dbefore, "gradient": grads}


# ------------------------------------------------------------------------------------------------------------- comparing

def alike(got, expected, n: int, what: str):
    """Two nests within the bound; the scale is the largest magnitude among a layer's arrays, which are made of one another."""
    got, expected = dict(paths(got)), dict(paths(expected))
    if got.keys() != expected.keys():
        raise AssertionError(f"{what}: {sorted(map(str, got.keys() ^ expected.keys()))[0]} is there only once")
    scales: dict = {}
    for path, array in expected.items():
        scales[path[:2]] = max(scales.get(path[:2], 0.0), float(np.max(np.abs(array), initial=0.0)))
    for path, array in expected.items():
        if got[path].shape != array.shape:
            raise AssertionError(f"{what}: {'.'.join(path)} has shape {list(got[path].shape)} and must have {list(array.shape)}")
        apart = distance(got[path], array, n, scales[path[:2]])
        if not apart <= 1:
            raise AssertionError(f"{what}: {'.'.join(path)} is {apart:.3g} times the bound away")


def same(got, expected, what: str):
    """Two nests, bitwise."""
    for (path, a), (_, b) in zip(paths(got), paths(expected), strict=True):
        if not np.array_equal(a, b):
            raise AssertionError(f"{what}: {'.'.join(path) or 'an array'} moves")


def states_of(after: dict) -> dict:
    """What a fixed memory holds: the states of the Mamba layers.  Attention keeps its keys, pads among them, and masks those."""
    return {name: state for name, state in after.items() if state is not None and "document" not in state}


# ------------------------------------------------------------------------------------------------------------ properties

def document_isolation(world, situation: Situation):
    """Change all but one document of each row: that one stays as it is, bitwise, and so do the gradients of a loss on it alone."""
    world.run(_document_isolation, 1, situation)


def _document_isolation(wire, situation):
    case = case_of(situation)
    batch = case.batch
    last = batch.document[:, -1:]
    mine = batch.document == last if situation.training.seed % 2 else batch.document == batch.document[:, :1]
    begins_here = (mine & (batch.position == 0)).any(1) | ~mine[:, 0]
    before = chains.start(case.chain, case.params, batch)
    other = _chosen(case.before(), before, begins_here)
    changed = batch._replace(tokens=np.where(mine, batch.tokens, (batch.tokens + 1) % situation.model.vocab))
    dy, results = None, []
    for batch, past in ((batch, before), (changed, other)):
        y, after, saved = down(case, batch, past)
        dy = np.where(mine[..., None], case.rng.standard_normal(y.shape).astype(case.dtype), 0) if dy is None else dy
        dbefore, grads = up(case, batch, dy, _zeros(after), saved)
        results.append({"logits": y[mine], "gradient": grads})
        if any(array[begins_here].any() for _, array in paths(_floats(dbefore))):
            raise AssertionError("the gradient of a document flows into what lay before it")
    same(results[1], results[0], "another document is changed")


def causality(world, situation: Situation):
    """Change a token: nothing before it moves, bitwise, and its own output does, unless dropout may have left nothing of it."""
    world.run(_causality, 1, situation)


def _causality(wire, situation):
    case = case_of(situation)
    batch, before = case.batch, case.before()
    t = int(case.rng.integers(batch.tokens.shape[1]))
    tokens = batch.tokens.copy()
    tokens[:, t] = (tokens[:, t] + 1) % situation.model.vocab
    a, b = (down(case, batch._replace(tokens=x), before)[0] for x in (batch.tokens, tokens))
    same({"logits": a[:, :t]}, {"logits": b[:, :t]}, f"token {t} is changed, and before it")
    if not situation.model.dropout and (a[:, t] == b[:, t]).all(axis=1).any():
        raise AssertionError(f"token {t} is changed, and its own output stays")


def split_invariance(world, situation: Situation):
    """A row read in pieces, each continuing what the one before left, and backward from the last, is the row read at once."""
    world.run(_split_invariance, 1, situation)


def _split_invariance(wire, situation):
    case = case_of(situation)
    batch, before = case.batch, case.before()
    y, after, _ = down(case, batch, before)
    dy, dafter = case.drawn(y), case.drawn(after)
    whole = both(case, batch, before, dy, dafter)
    tokens = y.shape[1]
    edges = [0, *sorted(case.rng.integers(0, tokens + 1, 2).tolist()), tokens]
    parts = [slice(a, b) for a, b in zip(edges, edges[1:])]
    pieces = [batch.cut(columns=part) for part in parts]

    ys, kept = [], []
    for piece in pieces:
        y, before, saved = down(case, piece, before)
        ys.append(y)
        kept.append(saved)
    total, dbefore = None, dafter
    for part, piece, saved in reversed(list(zip(parts, pieces, kept))):
        dbefore, grads = up(case, piece, dy[:, part], dbefore, saved)
        total = grads if total is None else add(total, grads)
    alike({"logits": np.concatenate(ys, axis=1), "after": before, "before": dbefore, "gradient": total}, whole, case.n,
          f"read in pieces cut at {edges[1:-1]}")


def padding_is_nothing(world, situation: Situation):
    """Pads before, between and behind the tokens, of any text: logits, states before and after, and gradients are those without."""
    world.run(_padding_is_nothing, 1, situation)


def _padding_is_nothing(wire, situation):
    case = case_of(situation)
    before = case.before()
    padded, here = with_pads(case.batch, int(case.rng.integers(1, 5)), situation.model.vocab, case.rng)
    results = []
    y, after, _ = down(case, case.batch, before)
    dy, dstates = case.drawn(y), case.drawn(states_of(after))
    for batch, place in ((padded, here), (case.batch, ...)):
        y, after, saved = down(case, batch, before)
        spread = np.zeros_like(y)
        spread[place] = dy
        dbefore, grads = up(case, batch, spread, _zeros(after) | dstates, saved)
        results.append({"logits": y[place], "after": states_of(after), "before": states_of(dbefore), "gradient": grads})
    alike(*results, case.n, "with pads")


def with_pads(batch: Batch, pads: int, vocab: int, rng) -> tuple[Batch, tuple]:
    """The batch with so many pads in each row, anywhere among its tokens; and the index [B, S] at which the tokens now stand."""
    rows, tokens = batch.tokens.shape
    columns = [np.sort(rng.permutation(tokens + pads)[:tokens]) for _ in range(rows)]
    place, shape = (np.arange(rows)[:, None], np.stack(columns)), (rows, tokens + pads)
    document = batch.document.min(initial=0) - 1         # ids may be any whole numbers
    wide = [rng.integers(0, vocab, shape), *(np.full(shape, pad) for pad in (-1, -1, document, -1))]
    for array, of_tokens in zip(wide, batch[:5]):
        array[place] = of_tokens
    return Batch(*wide, step=batch.step), place


def fast_equals_naive(world, situation: Situation):
    """The model by its fast forms (blocks, chunks) is the model by the naive ones: full softmax, the recurrences token by token."""
    world.run(_fast_equals_naive, 1, situation)


def _fast_equals_naive(wire, situation):
    model, seed = situation.model, situation.training.seed
    scans = {"mamba1": judges.mamba1_recurrence(), "mamba2": judges.mamba2_recurrence()}

    def fill(name, kind):
        core = judges.naive_core(attention_dropout(model.dropout, seed, name), model.reach)
        return plain(model, seed)(name, kind)._replace(core=core, scan=scans.get(kind))
    case, naive = case_of(situation), case_of(situation, fill)
    before = case.before()
    y, after, _ = down(case, case.batch, before)
    dy, dafter = case.drawn(y), case.drawn(after)
    alike(both(case, case.batch, before, dy, dafter), both(naive, case.batch, before, dy, dafter), case.n, "by the fast forms")


def gradient_is_derivative(world, situation: Situation):
    """Backward is the derivative of forward: finite differences along one direction of each layer's weights, and of its past."""
    world.run(_gradient_is_derivative, 1, situation)


def _gradient_is_derivative(wire, situation):
    model = replace(situation.model, norm_eps=SMOOTH, **LIMITS)
    case = case_of(replace(situation, model=model, training=replace(situation.training, dtype="float64")))
    before = case.before()

    def outputs(inputs):
        y, after, _ = down(case._replace(params=inputs["params"]), case.batch, _merged(before, inputs["before"]))
        return {"logits": y, "after": _floats(after)}
    inputs = {"params": case.params, "before": _floats(before)}
    d = case.drawn(outputs(inputs))
    _, after, saved = down(case, case.batch, before)
    dbefore, grads = up(case, case.batch, d["logits"], _merged(after, d["after"]), saved)
    assert_derivative(outputs, inputs, {"params": grads, "before": _floats(dbefore)}, d, case.rng, depth=2)


def shards_add_up(world, situation: Situation):
    """Mamba-2 by its groups: a layer that is given the weights of one group is one addend of the layer, forward and backward."""
    world.run(_shards_add_up, 1, situation)


def _shards_add_up(wire, situation):
    model = replace(situation.model, norm_group=0)
    case, layer = case_of(situation), mamba2.mamba2_layer(model, Seams())
    w = {name: case.rng.standard_normal(model.shape(dims)).astype(case.dtype) for name, dims in layer.dims.items()}
    x = case.rng.standard_normal((*case.batch.tokens.shape, model.width)).astype(case.dtype)

    def run(w, dy=None):
        y, after, saved = layer.forward(x, w, case.batch, layer.start(w, case.batch))
        dy = case.drawn(y) if dy is None else dy
        return dy, {"y": y, "dx": layer.backward(dy, _zeros(after), saved, w, case.batch)[0]}
    dy, whole = run(w)
    shards = [{name: weight[tuple(_shard(model, word, group) for word in layer.dims[name].split())] for name, weight in w.items()}
              for group in range(model.groups)]
    addends = [run(shard, dy)[1] for shard in shards]
    alike({name: sum(addend[name] for addend in addends) for name in whole}, whole, case.n, "the sum over the groups")


def _shard(model, word: str, group: int) -> slice:
    """The part of one dim, "D" or "MP/tp", that belongs to a group."""
    size, unit = model.dim(word)
    return share(size, model.groups, group, unit) if word.endswith("/tp") else slice(None)


# ----------------------------------------------------------------------------------------------------------------- nests

def _floats(tree):
    """A nest without its whole numbers and its Nones, and without what is then empty."""
    if isinstance(tree, dict):
        kept = {name: _floats(part) for name, part in tree.items()}
        return {name: part for name, part in kept.items() if part is not None and not (isinstance(part, dict) and not part)}
    return tree if tree is not None and tree.dtype.kind == "f" else None


def _merged(tree, floats):
    """The nest with the floating arrays of another in their places."""
    if isinstance(tree, dict):
        return {name: _merged(part, floats.get(name, {})) for name, part in tree.items()}
    return tree if tree is None or tree.dtype.kind != "f" else floats


def _zeros(tree):
    """Zeros in place of the floating arrays of a nest."""
    if isinstance(tree, dict):
        return {name: _zeros(part) for name, part in tree.items()}
    return tree if tree is None or tree.dtype.kind != "f" else np.zeros_like(tree)


def _chosen(a, b, rows):
    """A nest with a's rows where `rows` says so, else b's."""
    if isinstance(a, dict):
        return {name: _chosen(a[name], b[name], rows) for name in a}
    return a if a is None else np.where(rows.reshape(len(rows), *(1,) * (a.ndim - 1)), a, b)
