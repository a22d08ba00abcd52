"""Mamba-1's scan: the recurrence by finite differences, every other form by the recurrence, and where the quotient is right."""
import numpy as np
import pytest
from derivative import assert_derivative, drawn_like
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import Sizes, assert_alike, cast, positions, sizes

from refpar import watch
from refpar.oracle import scans
from refpar.oracle.scans import FORMS, quotient, sequential
from refpar.nn.seams import ALONE, Pair
from refpar.nn.selective import (
    Summary,
    chunked_backward,
    chunked_forward,
    merge,
    summary_of_state,
)
from refpar.oracle.equal import assert_equal, compare
from refpar.oracle.naive import selective_backward, selective_forward

SEQUENCES = ("x", "dt", "B", "C")
RECURRENCE = Pair(selective_forward, selective_backward)


def drawn(s: Sizes, dtype=np.float64, pads: float = 0.2):
    """I = M*P channels; some of the tokens are pads, whose step is 0."""
    rng, inner = np.random.default_rng(s.seed), s.M * s.P
    position = positions(rng, s.B, s.S, s.ends)
    position[rng.random(position.shape) < pads] = -1
    step = rng.uniform(0.05, 1, (s.B, s.S, inner)) * (position >= 0)[..., None]
    inputs = {"x": rng.standard_normal((s.B, s.S, inner)), "dt": step,
              "B": rng.standard_normal((s.B, s.S, s.N)), "C": rng.standard_normal((s.B, s.S, s.N)),
              "A_log": rng.uniform(-1, 1, (inner, s.N)), "before": rng.standard_normal((s.B, s.N, inner))}
    return rng, cast(inputs, dtype), position


def run(form: Pair, inputs, position, d=None, **options):
    """(outputs, gradients) of one form; d: the gradients of the outputs."""
    y, after, saved = form.forward(**inputs, position=position, **options)
    d = d or {"y": np.ones_like(y), "after": np.ones_like(after)}
    grads, dbefore, dA_log = form.backward(d["y"], d["after"], saved, inputs["A_log"], position, **options)
    return {"y": y, "after": after}, dict(zip(SEQUENCES, grads)) | {"A_log": dA_log, "before": dbefore}


def addends(s):
    return max(1, s.B * s.S) * max(s.N, s.M * s.P)


@settings(max_examples=20)
@given(sizes())
def test_derivative_of_the_recurrence(s):
    rng, inputs, position = drawn(s)
    outputs, _ = run(RECURRENCE, inputs, position)
    d = drawn_like(outputs, rng)
    _, grads = run(RECURRENCE, inputs, position, d)
    assert_derivative(lambda inputs: run(RECURRENCE, inputs, position)[0], inputs, grads, d, rng)


@settings(max_examples=60)
@given(sizes())
def test_chunks_are_the_recurrence(s):
    rng, inputs, position = drawn(s)
    d = drawn_like(run(RECURRENCE, inputs, position)[0], rng)
    got = run(Pair(chunked_forward, chunked_backward), inputs, position, d, chunk=s.L)
    for a, b in zip(got, run(RECURRENCE, inputs, position, d)):
        assert_alike(a, b, addends(s))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40)
@given(s=sizes(), chunk=st.integers(1, 9))
def test_every_form_is_the_recurrence(form, s, chunk):
    """Forward and backward; rows of no token, of one, and of no power of two."""
    rng, inputs, position = drawn(s)
    d = drawn_like(run(RECURRENCE, inputs, position)[0], rng)
    chosen = FORMS[form] if form != "chunked" else lambda a, b, start: scans.chunked(a, b, start, chunk)
    for a, b in zip(run(scans.selective(chosen), inputs, position, d), run(RECURRENCE, inputs, position, d)):
        assert_alike(a, b, addends(s))


@settings(max_examples=40)
@given(sizes(), st.integers(0, 10**6))
def test_ranks_in_a_row_are_the_recurrence(s, seed):
    """Each run sums itself up without the past; `carry` puts the past before it; forward, and backward from the end."""
    rng, inputs, position = drawn(s)
    d = drawn_like(run(RECURRENCE, inputs, position)[0], rng)
    cuts = np.sort(np.random.default_rng(seed).integers(0, s.S + 1, 2)).tolist()
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, s.S])]
    pieces = [inputs | {name: inputs[name][:, part] for name in SEQUENCES} for part in parts]

    def in_a_row(step, order):
        """Run all pieces to hear their summaries, and again with what lies before each."""
        told, on = {}, {}
        for i in order:
            step(i, lambda merge, own, given, i=i: (given, told.setdefault(i, own)))
        results = {}
        for place, i in enumerate(order):
            def carry(merge, own, given, place=place):
                here = given
                for j in order[:place]:
                    here = merge(here, told[j])
                on[i] = merge(here, told[i])
                return here, on[i]
            results[i] = step(i, carry)
        return results, on[order[-1]]

    def ahead(i, carry):
        return chunked_forward(**pieces[i], position=position[:, parts[i]], chunk=s.L, carry=Pair(carry, None))

    def back(i, carry):
        return chunked_backward(d["y"][:, parts[i]], d["after"], forward[i][2], inputs["A_log"], position[:, parts[i]], s.L,
                                Pair(None, carry))
    forward, end = in_a_row(ahead, [0, 1, 2])
    backward, first = in_a_row(back, [2, 1, 0])
    outputs = {"y": np.concatenate([forward[i][0] for i in range(3)], axis=1), "after": end.state}
    grads = {name: np.concatenate([backward[i][0][place] for i in range(3)], axis=1) for place, name in enumerate(SEQUENCES)}
    grads |= {"A_log": sum(backward[i][2] for i in range(3)), "before": first.state}
    for a, b in zip((outputs, grads), run(RECURRENCE, inputs, position, d)):
        assert_alike(a, b, addends(s))


@given(st.integers(0, 10**6))
def test_the_merge_is_associative_and_has_an_identity(seed):
    rng = np.random.default_rng(seed)
    a, b, c = (Summary(rng.uniform(0, 1, (2, 3, 4)) * rng.integers(0, 2, (2, 1, 1)), rng.standard_normal((2, 3, 4)))
               for _ in range(3))
    for left, right in zip(merge(merge(a, b), c), merge(a, merge(b, c))):
        assert_equal(left, right, 3)
    nothing = summary_of_state(np.zeros((2, 3, 4)))
    for same in (merge(nothing, a), merge(a, nothing)):
        assert np.array_equal(same.decay, a.decay) and np.array_equal(same.state, a.state)


@pytest.mark.parametrize("steepest, fastest", [(1.0, 0.1), (16.0, 3.0)])
def test_float32_keeps_its_digits(steepest, fastest):
    """512 tokens of mild and of strong decay, in float32 against float64 of the same inputs: no overflow, no NaN, no lost digit."""
    s = Sizes(seed=1, B=2, S=512, M=1, P=24, N=8, ends=0.01)
    rng, inputs, position = drawn(s, np.float32)
    inputs["dt"] = (rng.uniform(0.001, fastest, inputs["dt"].shape) * (position >= 0)[..., None]).astype(np.float32)
    inputs["A_log"] = np.log(rng.uniform(0.5, steepest, inputs["A_log"].shape)).astype(np.float32)
    d = cast(drawn_like(run(RECURRENCE, inputs, position)[0], rng), np.float32)
    exact = run(RECURRENCE, cast(inputs, np.float64), position, cast(d, np.float64))
    for form in (Pair(chunked_forward, chunked_backward), *map(scans.selective, FORMS.values())):
        with np.errstate(all="raise", under="ignore"):
            got = run(form, inputs, position, d)
        for a, b in zip(got, exact):
            apart = compare(cast(b, np.float32), a, 1)                              # n = 1: as if there were a single addition
            assert max(apart.values()) <= 1, apart


@pytest.mark.parametrize("dtype, smallest", [(np.float32, 1e-38), (np.float64, 1e-308)])
def test_the_quotient_is_right_until_the_product_underflows(dtype, smallest):
    """Its range: exact to rounding while the running product stays in the dtype; then infinities, where the recurrence is calm."""
    rng = np.random.default_rng(0)
    a = np.full((3000, 4), 0.7, dtype)
    b, start = rng.standard_normal(a.shape).astype(dtype), np.zeros(4, dtype)
    reach = int(np.log(smallest) / np.log(0.7))                                     # 245 tokens in float32, 1988 in float64
    h, right = quotient(a, b, start), sequential(a, b, start)
    assert np.isfinite(right).all()
    assert_equal(h[:reach - 20], right[:reach - 20], reach)
    assert not np.isfinite(h[reach + 60:]).any()


def test_the_quotient_overflows_on_what_mamba_starts_with():
    """The published start, steps up to 1/10 and rates up to 16, at 1,024 tokens: most of the states are lost."""
    rng = np.random.default_rng(0)
    a = np.exp(-rng.uniform(0.001, 0.1, (1024, 16)) * np.arange(1, 17)).astype(np.float32)
    h = quotient(a, rng.standard_normal(a.shape).astype(np.float32), np.zeros(16, np.float32))
    assert 0.5 < (~np.isfinite(h)).mean() < 0.9


@given(sizes())
def test_float32_stays(s):
    _, inputs, position = drawn(s, np.float32)
    for form in (RECURRENCE, Pair(chunked_forward, chunked_backward), *map(scans.selective, FORMS.values())):
        assert {array.dtype for array in watch.arrays_of(run(form, inputs, position))} == {np.dtype(np.float32)}


@settings(max_examples=20)
@given(sizes())
def test_operations(s):
    """Forward reads the states once, 2 b s n i; backward makes dC of them, dB and the inflow of their gradients.  A second run,
    where something lies before or behind, is counted too.  The rest is elementwise."""
    _, inputs, position = drawn(s)
    for past, runs in ((0, 1), (1, 2)):
        case = inputs | {"before": past * (1 + np.abs(inputs["before"]))}
        with watch.watching(watch.Ledger()) as ahead:
            y, after, saved = chunked_forward(**case, position=position)
        with watch.watching(watch.Ledger()) as back:
            chunked_backward(y, past * np.ones_like(after), saved, inputs["A_log"], position, carry=ALONE)
        once = 2 * s.B * s.S * s.N * s.M * s.P * runs
        assert ahead.flops == ({"C h": once} if once else {})
        assert back.flops == ({"C h": once, "B X": 2 * once} if once else {})
