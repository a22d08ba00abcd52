"""Drawn inputs for the tests of conv, scan and Mamba-2: awkward sizes, and documents that begin anywhere."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from derivative import drawn_like, paths
from hypothesis import strategies as st

from refpar import watch
from refpar.corpus import Batch
from refpar.nn.product import settle
from refpar.oracle.equal import assert_equal


class Sizes(NamedTuple):
    """Sizes of one case, by the letters of the glossary; `ends` is the chance that a document ends at a token."""
    seed: int = 0
    B: int = 2
    S: int = 9
    M: int = 4
    P: int = 3
    G: int = 2
    N: int = 5
    W: int = 4
    L: int = 4
    ends: float = 0.2


@st.composite
def sizes(draw) -> Sizes:
    """Rows without tokens, chunks longer than the row and of one token, one group and a group for each head, one tap."""
    groups = draw(st.integers(1, 3))
    return Sizes(draw(st.integers(0, 10**6)), draw(st.integers(1, 2)), draw(st.integers(0, 13)), groups * draw(st.integers(1, 3)),
                 draw(st.integers(1, 3)), groups, draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 15)),
                 draw(st.sampled_from([0.0, 0.2, 0.6])))


@st.composite
def variants(draw, s: Sizes) -> dict:
    """Fields of config.Model by which Mamba models differ, Mamba-2's norm groups from one channel to all of them among them.

    Without limits of the time step, over which a finite difference might step.
    """
    channels = s.M * s.P
    return {"conv_bias": draw(st.booleans()), "conv_act": draw(st.sampled_from(["silu", "none"])), "dt_bias": draw(st.booleans()),
            "skip_by": draw(st.sampled_from(["head", "channel"])), "norm_first": draw(st.booleans()),
            "norm_group": draw(st.sampled_from([0, *(n for n in range(1, channels + 1) if channels % n == 0)]))}


def positions(rng, rows: int, tokens: int, ends: float) -> np.ndarray:
    """[B, S]: rises by 1 or returns to 0; a row may begin inside a document."""
    position = np.zeros((rows, tokens), np.int64)
    now = rng.integers(0, 4, rows)
    for t in range(tokens):
        position[:, t] = now
        now = np.where(rng.random(rows) < ends, 0, now + 1)
    return position


def batch_of(rng, position, vocab: int = 2) -> Batch:
    """A batch with these positions: drawn tokens, and targets of which some are ignored."""
    tokens = rng.integers(0, vocab, position.shape)
    targets = np.where(rng.random(position.shape) < 0.3, -1, rng.integers(0, vocab, position.shape))
    document = np.cumsum(position == 0, axis=1) + 100 * np.arange(len(position))[:, None]
    return Batch(tokens, targets, position, document, np.arange(position.size).reshape(position.shape))


def with_pads(rng, batch: Batch, pads: int) -> tuple[Batch, tuple]:
    """The batch with so many pads in each row, anywhere among its tokens; and the index [B, S] at which the tokens now stand."""
    rows, tokens = batch.tokens.shape
    place = np.stack([np.sort(rng.permutation(tokens + pads)[:tokens]) for _ in range(rows)])
    here = np.arange(rows)[:, None], place.astype(np.int64)
    shape, wide = (rows, tokens + pads), []
    for array, pad in zip(batch[:5], (rng.integers(0, 2, shape), -1, -1, -1, -1)):
        wide.append(np.broadcast_to(pad, shape).astype(np.int64))
        wide[-1][here] = array
    return Batch(*wide), here


def scan_inputs(rng, s: Sizes, dtype=np.float64) -> dict:
    """x, dt, B, C, A_log, before of Mamba-2's scan."""
    inputs = {"x": rng.standard_normal((s.B, s.S, s.M, s.P)), "dt": rng.uniform(0.05, 1, (s.B, s.S, s.M)),
              "B": rng.standard_normal((s.B, s.S, s.G, s.N)), "C": rng.standard_normal((s.B, s.S, s.G, s.N)),
              "A_log": rng.uniform(-1, 1, s.M),
              "before": rng.standard_normal((s.B, s.M, s.P, s.N))}
    return cast(inputs, dtype)


def cast(tree, dtype):
    """Every array of a nest in this dtype."""
    return {name: cast(branch, dtype) for name, branch in tree.items()} if isinstance(tree, dict) else tree.astype(dtype)


def split(batch: Batch, cuts) -> list[Batch]:
    """The batch cut along its tokens: runs between 0, the cuts and the end."""
    edges = [0, *cuts, batch.tokens.shape[1]]
    return [batch.cut(columns=slice(a, b)) for a, b in zip(edges, edges[1:])]


# ---------------------------------------------------------------------------------------------------------------- layers

def outputs_of(layer, inputs, batch):
    y, after, _ = layer.forward(inputs["x"], inputs["w"], batch, inputs["before"])
    return {"y": y, "after": after}


def gradients_of(layer, inputs, batch, d):
    """Gradients of x, w and before."""
    _, _, saved = layer.forward(inputs["x"], inputs["w"], batch, inputs["before"])
    dx, dbefore, grads = layer.backward(d["y"], d["after"], saved, inputs["w"], batch)
    return {"x": dx, "w": settle(grads), "before": dbefore}


def assert_pads_are_nothing(layer, inputs, batch, rng, pads: int, n: int):
    """Pads anywhere, with any input: outputs and gradients of the tokens, and the states before and after, are those without."""
    padded, here = with_pads(rng, batch, pads)
    wide = rng.standard_normal((*padded.tokens.shape, inputs["x"].shape[2]))
    wide[here] = inputs["x"]
    outputs, d = outputs_of(layer, inputs, batch), None
    d = drawn_like(outputs, rng)
    dy = np.zeros_like(wide)
    dy[here] = d["y"]
    got = outputs_of(layer, inputs | {"x": wide}, padded)
    assert_alike(got | {"y": got["y"][here]}, outputs, n)
    grads = gradients_of(layer, inputs | {"x": wide}, padded, d | {"y": dy})
    assert not grads["x"][padded.position < 0].any()
    assert_alike(grads | {"x": grads["x"][here]}, gradients_of(layer, inputs, batch, d), n)


def frozen(tree):
    """Nobody may write to these arrays."""
    for array in watch.arrays_of(tree):
        array.flags.writeable = False
    return tree


def assert_alike(got: dict, expected: dict, n: int):
    """Two nests of the same names within the bound, whose scale is that of the largest array: they are made of one another."""
    got, expected = dict(paths(got)), dict(paths(expected))
    assert got.keys() == expected.keys()
    scale = max([1, *(np.abs(array).max(initial=0) for array in expected.values())])
    for path, array in got.items():
        assert_equal(array, expected[path], n, scale=scale, name=".".join(path))
