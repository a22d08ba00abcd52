"""The causal conv: its plain meaning, its derivative, its merge, and documents that stay apart."""
import numpy as np
from derivative import assert_derivative, drawn_like
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import positions, sizes

from refpar.nn.conv import Tail, conv_backward, conv_forward, tail_merge, tail_merge_backward, tail_of
from refpar.oracle.equal import assert_equal


def drawn(s, dtype=np.float64):
    rng = np.random.default_rng(s.seed)
    C = s.M * s.P
    inputs = {"x": rng.standard_normal((s.B, s.S, C)), "w": rng.standard_normal((s.W, C)), "bias": rng.standard_normal(C),
              "before": rng.standard_normal((s.B, s.W - 1, C))}
    return rng, {name: array.astype(dtype) for name, array in inputs.items()}, positions(rng, s.B, s.S, s.ends)


def naive(x, w, bias, position, before):
    """The formula, token by token and tap by tap."""
    reach = len(w) - 1
    seen = np.concatenate([before, x], axis=1)
    y = np.empty_like(x)
    for b, t in np.ndindex(position.shape):
        y[b, t] = bias + sum(w[k] * seen[b, reach + t - k] for k in range(len(w)) if position[b, t] >= k)
    return y, seen[:, seen.shape[1] - reach:]


def backward(dy, dafter, saved, inputs, position):
    dx, dbefore, dw, dbias = conv_backward(dy, dafter, saved, inputs["w"], position)
    return {"x": dx, "w": dw, "bias": dbias, "before": dbefore}


@given(sizes())
def test_it_is_the_formula(s):
    _, inputs, position = drawn(s)
    y, after, _ = conv_forward(**inputs, position=position)
    expected, expected_after = naive(**inputs, position=position)
    assert_equal(y, expected, s.W + 1)
    assert np.array_equal(after, expected_after)


@given(sizes(), st.data())
def test_pads_are_no_inputs(s, data):
    """Pads anywhere: the tokens' outputs and the tail are those of each row's tokens alone; a pad's output is the bias."""
    rng, inputs, position = drawn(s)
    pads = rng.random(position.shape) < 0.4
    y, after, _ = conv_forward(**inputs, position=np.where(pads, -1, position))
    assert_equal(y[pads], np.broadcast_to(inputs["bias"], y[pads].shape), 1)
    for b in range(s.B):
        row, own = slice(b, b + 1), ~pads[b]
        alone = inputs | {"x": inputs["x"][row, own], "before": inputs["before"][row]}
        expected, tail = naive(**alone, position=position[row, own])
        assert_equal(y[row, own], expected, s.W + 1)
        assert np.array_equal(after[row], tail)


@settings(max_examples=30)
@given(sizes())
def test_derivative(s):
    rng, inputs, position = drawn(s)
    position[rng.random(position.shape) < 0.2] = -1
    y, after, saved = conv_forward(**inputs, position=position)
    d = drawn_like({"y": y, "after": after}, rng)
    grads = backward(d["y"], d["after"], saved, inputs, position)
    assert_derivative(lambda inputs: dict(zip(("y", "after"), conv_forward(**inputs, position=position))), inputs, grads, d, rng)


@given(sizes(), st.data())
def test_pieces_are_the_whole(s, data):
    """Runs through before and after, forward and backward, also runs shorter than the conv and runs of no tokens."""
    rng, inputs, position = drawn(s)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, s.S), max_size=3))), s.S]
    y, after, saved = conv_forward(**inputs, position=position)
    d = drawn_like({"y": y, "after": after}, rng)
    grads = backward(d["y"], d["after"], saved, inputs, position)

    runs, before, ys = [], inputs["before"], []
    for a, b in zip(edges, edges[1:]):
        piece = inputs | {"x": inputs["x"][:, a:b], "before": before}
        y_piece, before, kept = conv_forward(**piece, position=position[:, a:b])
        runs.append((a, b, kept))
        ys.append(y_piece)
    assert_equal(np.concatenate(ys, axis=1), y, s.W + 1)
    assert np.array_equal(before, after)

    dbefore, dx = d["after"], np.zeros_like(inputs["x"])
    total = {name: np.zeros_like(inputs[name]) for name in ("w", "bias")}
    for a, b, kept in reversed(runs):
        got = backward(d["y"][:, a:b], dbefore, kept, inputs, position[:, a:b])
        dx[:, a:b], dbefore = got["x"], got["before"]
        total = {name: total[name] + got[name] for name in total}
    scale = max(1, *(np.abs(grad).max(initial=0) for grad in grads.values()))
    for name, grad in {"x": dx, "before": dbefore, **total}.items():
        assert_equal(grad, grads[name], s.B * s.S + s.W, scale=scale, name=name)


def test_an_impulse_answers_now_and_later():
    """The taps in their order, first now; nothing earlier; and no longer than the conv reaches."""
    x, w = np.zeros((1, 7, 1)), np.array([[2.0], [3.0], [5.0]])
    x[0, 2] = 1
    y, after, _ = conv_forward(x, w, np.zeros(1), np.arange(7)[None], np.zeros((1, 2, 1)))
    assert y[0, :, 0].tolist() == [0, 0, 2, 3, 5, 0, 0]
    assert np.array_equal(after, x[:, 5:])


@given(sizes())
def test_a_document_does_not_see_its_neighbour(s):
    """Bitwise, forward and backward, whatever the other documents hold."""
    rng, inputs, position = drawn(s)
    begun = np.cumsum(position == 0, axis=1)
    mine = (begun == begun.max(initial=0)) & (begun > 0)        # the last documents, all of them begun in the row
    other = inputs | {"x": np.where(mine[..., None], inputs["x"], 1e6 * rng.standard_normal(inputs["x"].shape)),
                      "before": 1e6 * rng.standard_normal(inputs["before"].shape)}
    dy = np.where(mine[..., None], rng.standard_normal(inputs["x"].shape), 0)
    results = []
    for case in (inputs, other):
        y, after, saved = conv_forward(**case, position=position)
        grads = backward(dy, np.zeros_like(after), saved, case, position)
        results.append((y[mine], grads["x"][mine], grads["w"], grads["bias"]))
        assert not grads["x"][~mine].any() and not grads["before"].any()
    assert all(np.array_equal(a, b) for a, b in zip(*results))


@given(st.integers(0, 10**6), st.integers(0, 4), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_the_merge_is_associative_and_says_the_last_inputs(seed, reach, lengths):
    rng = np.random.default_rng(seed)
    runs = [rng.standard_normal((2, n, 3)) for n in lengths]
    a, b, c = (tail_of(x, reach, np.full(2, x.shape[1])) for x in runs)
    nothing = tail_of(runs[0][:, :0], reach, np.zeros(2, int))
    both = tail_of(np.concatenate(runs, axis=1), reach, np.full(2, sum(lengths)))

    def same(u, v):
        return np.array_equal(u.count, v.count) and np.array_equal(u.rows, v.rows)
    assert same(tail_merge(tail_merge(a, b), c), both) and same(tail_merge(a, tail_merge(b, c)), both)
    assert same(tail_merge(nothing, a), a) and same(tail_merge(a, nothing), a)



@given(st.integers(0, 10**6), st.integers(0, 4), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_the_backward_merge_is_associative_and_the_transpose(seed, reach, lengths):
    """On small integers, so exactly."""
    rng = np.random.default_rng(seed)
    a, b, c, given = (Tail(np.array([n, n + 1]), rng.integers(-9, 9, (2, reach, 3))) for n in [*lengths, 0])
    turned = tail_merge_backward(tail_merge_backward(c, b), a), tail_merge_backward(c, tail_merge_backward(b, a))
    assert np.array_equal(turned[0].count, turned[1].count) and np.array_equal(turned[0].rows, turned[1].rows)

    linear = b._replace(rows=0 * b.rows)
    moved, back = tail_merge(given, linear).rows, tail_merge_backward(c, linear).rows
    assert (c.rows * moved).sum() == (back * given.rows).sum()                      # <dy, A x> = <A' dy, x>


@given(sizes())
def test_float32_stays(s):
    _, inputs, position = drawn(s, np.float32)
    y, after, saved = conv_forward(**inputs, position=position)
    grads = backward(y, after, saved, inputs, position)
    assert {array.dtype for array in (y, after, *saved.values(), *grads.values())} == {np.dtype(np.float32)}


@given(sizes())
def test_a_row_alone_is_as_in_a_batch(s):
    """No shortcut for one row."""
    _, inputs, position = drawn(s)
    y, after, _ = conv_forward(**inputs, position=position)
    for b in range(s.B):
        row = slice(b, b + 1)
        alone = inputs | {"x": inputs["x"][row], "before": inputs["before"][row]}
        y_alone, after_alone, _ = conv_forward(**alone, position=position[row])
        assert_equal(y_alone, y[row], s.W + 1)
        assert np.array_equal(after_alone, after[row])
