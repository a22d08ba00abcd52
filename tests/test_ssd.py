"""The selective scan: the recurrence by finite differences, the chunks by the recurrence, and the survey's count of operations."""

import numpy as np
import pytest
from derivative import assert_derivative, drawn_like
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import Sizes, assert_alike, cast, positions, scan_inputs, sizes

from refpar import watch
from refpar.nn.scan import Summary, group_of, merge, summary_of_state
from refpar.nn.ssd import ssd_backward, ssd_forward
from refpar.oracle.equal import assert_equal, compare
from refpar.oracle.naive import scan_backward, scan_forward

SEQUENCES = ("x", "dt", "B", "C")               # of a scan's inputs, those with tokens


def drawn(s, dtype=np.float64):
    rng = np.random.default_rng(s.seed)
    return rng, scan_inputs(rng, s, dtype), positions(rng, s.B, s.S, s.ends)


def run(forward, backward, inputs, position, d=None, **options):
    """(outputs, gradients) of one form of the scan, two nests; d: the gradients of the outputs."""
    y, after, saved = forward(**inputs, position=position, **options)
    d = d or {"y": np.ones_like(y), "after": np.ones_like(after)}
    (dx, ddt, dB, dC), dbefore, dA_log = backward(d["y"], d["after"], saved, inputs["A_log"], position, **options)
    return {"y": y, "after": after}, {"x": dx, "dt": ddt, "B": dB, "C": dC, "A_log": dA_log, "before": dbefore}


def recurrence(inputs, position, d=None):
    return run(scan_forward, scan_backward, inputs, position, d)


def chunks(inputs, position, chunk, d=None):
    return run(ssd_forward, ssd_backward, inputs, position, d, chunk=chunk)


def addends(s):
    return max(1, s.B * s.S) * max(s.N, s.P, s.M)


@settings(max_examples=20)
@given(sizes())
def test_derivative_of_the_recurrence(s):
    rng, inputs, position = drawn(s)
    outputs, _ = recurrence(inputs, position)
    d = drawn_like(outputs, rng)
    _, grads = recurrence(inputs, position, d)
    assert_derivative(lambda inputs: recurrence(inputs, position)[0], inputs, grads, d, rng)


@given(sizes())
def test_chunks_are_the_recurrence(s):
    rng, inputs, position = drawn(s)
    d = drawn_like(recurrence(inputs, position)[0], rng)
    for got, expected in zip(chunks(inputs, position, s.L, d), recurrence(inputs, position, d)):
        assert_alike(got, expected, addends(s))


@given(sizes(), st.data())
def test_pieces_are_the_whole(s, data):
    """Runs of any length through before and after, forward and backward; the chunks begin anew in each."""
    rng, inputs, position = drawn(s)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, s.S), max_size=3))), s.S]
    d = drawn_like(recurrence(inputs, position)[0], rng)
    runs, before, ys = [], inputs["before"], []
    for a, b in zip(edges, edges[1:]):
        piece = {name: inputs[name][:, a:b] for name in SEQUENCES} | {"A_log": inputs["A_log"], "before": before}
        y, before, saved = ssd_forward(**piece, position=position[:, a:b], chunk=s.L)
        runs.append((a, b, saved))
        ys.append(y)
    outputs = {"y": np.concatenate(ys, axis=1), "after": before}

    grads = {name: np.zeros_like(inputs[name]) for name in SEQUENCES}
    grads["A_log"] = np.zeros(s.M)
    dafter = d["after"]
    for a, b, saved in reversed(runs):
        inner, dafter, dA_log = ssd_backward(d["y"][:, a:b], dafter, saved, inputs["A_log"], position[:, a:b], s.L)
        for name, grad in zip(SEQUENCES, inner):
            grads[name][:, a:b] = grad
        grads["A_log"] += dA_log
    for got, expected in zip((outputs, grads | {"before": dafter}), recurrence(inputs, position, d)):
        assert_alike(got, expected, addends(s))


@given(sizes())
def test_a_document_does_not_see_its_neighbour(s):
    """Bitwise, forward and backward, whatever the other documents hold and however strongly they decay."""
    rng, inputs, position = drawn(s)
    begun = np.cumsum(position == 0, axis=1)
    mine = (begun == begun.max(initial=0)) & (begun > 0)        # the last documents, all of them begun in the row
    noise = scan_inputs(rng, s)
    other = {name: np.where(mine.reshape(mine.shape + (1,) * (inputs[name].ndim - 2)), inputs[name], 100 * noise[name])
             for name in SEQUENCES} | {"A_log": inputs["A_log"], "before": 100 * noise["before"]}
    dy = np.where(mine[..., None, None], rng.standard_normal(inputs["x"].shape), 0)
    d = {"y": dy, "after": np.zeros_like(inputs["before"])}
    results = []
    for case in (inputs, other):
        outputs, grads = chunks(case, position, s.L, d)
        results.append([outputs["y"][mine], *(grads[name][mine] for name in SEQUENCES)])
        assert not any(grads[name][~mine].any() for name in SEQUENCES)
        assert not grads["before"].any()
    assert all(np.array_equal(a, b) for a, b in zip(*results))


@given(sizes(), st.data())
def test_causal(s, data):
    """A change at token t leaves all outputs before t bitwise alone, and changes that at t."""
    _, inputs, position = drawn(s._replace(S=max(s.S, 1)))
    t = data.draw(st.integers(0, position.shape[1] - 1))
    changed = dict(inputs)
    for name in SEQUENCES:
        changed[name] = inputs[name].copy()
        changed[name][:, t] *= 1.5
    a, b = (chunks(case, position, s.L)[0]["y"] for case in (inputs, changed))
    assert np.array_equal(a[:, :t], b[:, :t])
    assert (a[:, t] != b[:, t]).all()


@given(sizes())
def test_a_row_alone_is_as_in_a_batch(s):
    """No shortcut for one row."""
    _, inputs, position = drawn(s)
    whole, _ = chunks(inputs, position, s.L)
    for b in range(s.B):
        row = slice(b, b + 1)
        alone = {name: array if name == "A_log" else array[row] for name, array in inputs.items()}
        got, _ = chunks(alone, position[row], s.L)
        assert_alike(got, {name: array[row] for name, array in whole.items()}, addends(s))


def test_padding_behind_is_its_own_document():
    """Rows of 5, 8 and 2 tokens, filled up with pads: outputs and gradients of the real tokens are those of each row alone."""
    s = Sizes(B=3, S=8, L=3)
    rng, inputs, _ = drawn(s)
    lengths = [5, 8, 2]
    position = np.stack([[*range(n), *range(8 - n)] for n in lengths])
    real = position == np.arange(8)
    d = {"y": np.where(real[..., None, None], rng.standard_normal(inputs["x"].shape), 0), "after": np.zeros_like(inputs["before"])}
    outputs, grads = chunks(inputs, position, s.L, d)
    for b, n in enumerate(lengths):
        row = slice(b, b + 1)
        alone = {name: inputs[name][row, :n] for name in SEQUENCES} | {"A_log": inputs["A_log"], "before": inputs["before"][row]}
        outputs_alone, grads_alone = chunks(alone, position[row, :n], s.L, {"y": d["y"][row, :n], "after": d["after"][row]})
        assert_alike({"y": outputs["y"][row, :n]}, {"y": outputs_alone["y"]}, addends(s))
        real_grads = {name: grads[name][row, :n] for name in SEQUENCES}
        assert_alike(real_grads, {name: grads_alone[name] for name in SEQUENCES}, addends(s))


@given(st.integers(0, 10**6))
def test_the_merge_is_associative_and_has_an_identity(seed):
    rng = np.random.default_rng(seed)
    a, b, c = (Summary(rng.uniform(0, 1, (2, 3)) * rng.integers(0, 2, (2, 3)), rng.standard_normal((2, 3, 4, 5))) for _ in range(3))
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    assert_equal(left.decay, right.decay, 3)
    assert_equal(left.state, right.state, 3)
    nothing = summary_of_state(np.zeros((2, 3, 4, 5)))
    for same in (merge(nothing, a), merge(a, nothing)):
        assert np.array_equal(same.decay, a.decay) and np.array_equal(same.state, a.state)


@given(st.integers(1, 4), st.integers(0, 4))
def test_heads_of_a_group_stand_together(groups, each):
    """Also on a rank of a run that was left without heads."""
    assert group_of(groups * each, groups).tolist() == [g for g in range(groups) for _ in range(each)]


def test_no_heads_at_all():
    """A rank without heads, which still holds a group: empty outputs, and nothing of B and C."""
    _, inputs, position = drawn(Sizes(M=0, G=1))
    outputs, grads = chunks(inputs, position, 4)
    assert outputs["y"].size == 0 and not grads["B"].any() and not grads["C"].any()


@pytest.mark.parametrize("steepest, fastest", [(1.0, 0.1), (16.0, 3.0)])
def test_float32_keeps_its_digits(steepest, fastest):
    """512 tokens of mild and of strong decay, in float32 against float64 of the same inputs: no overflow, no NaN, no lost digit."""
    s = Sizes(seed=1, B=2, S=512, M=4, P=16, G=2, N=16, L=64)
    rng, inputs, position = drawn(s._replace(ends=0.01), np.float32)
    inputs["dt"] = rng.uniform(0.001, fastest, inputs["dt"].shape).astype(np.float32)
    inputs["A_log"] = np.log(rng.uniform(0.5, steepest, s.M)).astype(np.float32)
    d = cast(drawn_like(recurrence(inputs, position)[0], rng), np.float32)
    with np.errstate(all="raise", under="ignore"):
        got = chunks(inputs, position, s.L, d)
    exact = chunks(cast(inputs, np.float64), position, s.L, cast(d, np.float64))
    for a, b in zip(got, exact):
        apart = compare(cast(b, np.float32), a, 1)                                  # n = 1: as if there were a single addition
        assert max(apart.values()) <= 1, apart


@given(sizes())
def test_float32_stays(s):
    _, inputs, position = drawn(s, np.float32)
    for results in (recurrence(inputs, position), chunks(inputs, position, s.L)):
        assert {array.dtype for array in watch.arrays_of(results)} == {np.dtype(np.float32)}


@settings(max_examples=40)
@given(sizes())
def test_operations_are_the_survey_s(s):
    """Section 5.1 of the survey, term by term, for whole chunks; but C B' is made once for each group, and the survey's h stands
    for heads: it repeats B and C."""
    L = s.L
    c = s.S // L
    s = s._replace(S=c * L)
    _, inputs, position = drawn(s)
    with watch.watching(watch.Ledger()) as forward:
        y, after, saved = ssd_forward(**inputs, position=position, chunk=L)
    with watch.watching(watch.Ledger()) as backward:
        ssd_backward(y, after, saved, inputs["A_log"], position, L)
    chunks = 2 * s.B * c
    terms = {"C B'": chunks * s.G * L * L * s.N, "(C B' o decay) X": chunks * s.M * L * L * s.P,
             "chunk states": chunks * s.M * L * s.P * s.N, "inter-chunk": chunks * s.M * s.P * s.N,
             "C h": chunks * s.M * s.P * s.N * L}
    assert forward.flops == {name: flops for name, flops in terms.items() if c}
    times = {"C B'": 3, "(C B' o decay) X": 2, "chunk states": 3, "inter-chunk": 1, "C h": 2}
    assert backward.flops == {name: times[name] * flops for name, flops in terms.items() if c}
