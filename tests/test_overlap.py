"""Collective matmul is an all_gather and products, or products and a reduce_scatter, and each is the other's transpose."""
from typing import NamedTuple

import numpy as np
from drawn import check
from hypothesis import strategies as st

from refpar import watch
from refpar.comm.collectives import all_gather, reduce_scatter
from refpar.comm.mesh import Axis
from refpar.config import share, shares
from refpar.corpus import Batch
from refpar.nn.product import settle
from refpar.nn.projection import mapped
from refpar.parallel.overlap import overlapped


class Case(NamedTuple):
    """Whole numbers, so that every order of a sum gives the same bits."""
    ranks: int
    rows: int
    length: int
    width: int
    outs: tuple[int, ...]
    stacked: bool
    seed: int


def cases(most: int):
    return st.builds(Case, st.integers(1, most), st.integers(0, 2), st.integers(0, 7), st.integers(1, 4),
                     st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), st.booleans(), st.integers(0, 999))


def program(wire, case):
    tp, rng = Axis.world(wire), np.random.default_rng(case.seed)
    sizes, mine = shares(case.length, tp.size), share(case.length, tp.size, tp.index)
    none = np.zeros((case.rows, case.length), np.int64)
    batch = Batch(none, none, none, none, none)

    def drawn(*shape):
        return rng.integers(-4, 5, shape).astype(np.float64)
    x = drawn(case.rows, case.length, case.width)
    w = {str(i): drawn(case.width, out) for i, out in enumerate(case.outs)}
    if case.stacked:
        w["stacked"] = drawn(2, case.width, 3)
    own = np.random.default_rng([case.seed, tp.index])      # what differs from rank to rank
    w = {name: weight + own.integers(0, 3) for name, weight in w.items()}
    into, out_of = overlapped(tp)

    with watch.watching(watch.Ledger()) as ledger:
        ys, saved = into.forward(x[:, mine], w, batch)
    with watch.watching(watch.Ledger()) as plain:
        whole = all_gather(x[:, mine], tp, 1, sizes, algorithm="ring")
    assert ledger.sent()[0] == tp.size - 1 and ledger.sent() == plain.sent()
    for name, weight in w.items():
        assert np.array_equal(ys[name], mapped(whole, weight)), name
    dys = {name: own.integers(-4, 5, y.shape).astype(np.float64) for name, y in ys.items()}
    with watch.watching(watch.Ledger()) as ledger:
        dx, grads = into.backward(dys, saved, w, batch)
    flat = [pair for name in w for pair in (zip(dys[name], w[name]) if w[name].ndim == 3 else [(dys[name], w[name])])]
    full = sum(dy @ weight.T for dy, weight in flat)
    with watch.watching(watch.Ledger()) as plain:
        expected = reduce_scatter(full, tp, 1, sizes, algorithm="ring")
    assert np.array_equal(dx, expected) and ledger.sent() == plain.sent()
    for name, grad in settle(grads).items():
        assert np.array_equal(grad, np.einsum("bsd,...bso->...do", x, dys[name])), name

    a, down = (own.integers(-4, 5, shape).astype(np.float64) for shape in ((case.rows, case.length, 3), (3, case.width)))
    y, saved = out_of.forward(a, down, batch)
    assert np.array_equal(y, reduce_scatter(a @ down, tp, 1, sizes))
    da, grad = out_of.backward(y, saved, down, batch)
    dwhole = all_gather(y, tp, 1, sizes)
    assert np.array_equal(da, dwhole @ down.T) and np.array_equal(settle(grad), np.einsum("bsj,bsd->jd", a, dwhole))


def overlaps(world, case):
    """Equal to the plain form, and sends what it sends."""
    world.run(program, case.ranks, case)


def test_each_is_its_plain_form(world):
    check(world, overlaps, cases(7 if world.kind == "threads" else 4), examples=50)
