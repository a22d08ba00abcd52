"""SUMMA is a matrix product and its two gradients, exactly, on whole numbers; and sends what its formula says."""
from typing import NamedTuple

import numpy as np
from drawn import check
from hypothesis import strategies as st

from refpar import watch
from refpar.comm.mesh import Mesh
from refpar.config import Layout
from refpar.contrast import summa


class Case(NamedTuple):
    """A grid of q x q ranks, so many copies of it, and the sizes of the product."""
    q: int
    depth: int
    tokens: int
    inner: int
    out: int
    seed: int


def cases(most: int):
    size = st.integers(0, 7)
    grids = [(q, depth) for q in (1, 2, 3) for depth in (1, 2, 3) if q * q * depth <= most]
    return st.builds(lambda grid, *sizes: Case(*grid, *sizes), st.sampled_from(grids), size, size, size, st.integers(0, 999))


def program(wire, case: Case):
    """One rank: its blocks of y, dx and dw beside those of the whole product, and what it sent forward."""
    mesh = Mesh(Layout(dp=case.depth, cp=case.q, tp=case.q), wire)
    grid, rng = summa.Grid(mesh.axis("tp"), mesh.axis("cp"), mesh.axis("dp")), np.random.default_rng(case.seed)
    x, w, dy = (rng.integers(-3, 4, shape).astype(float) for shape in
                ((case.tokens, case.inner), (case.inner, case.out), (case.tokens, case.out)))
    with watch.watching(watch.Ledger()) as ledger:
        y = summa.forward(summa.block(x, grid), summa.block(w, grid), grid, case.inner)
    dx, dw = summa.backward(summa.block(dy, grid), summa.block(x, grid), summa.block(w, grid), grid, case.inner)
    for name, mine, whole in (("y", y, x @ w), ("dx", dx, dy @ w.T), ("dw", dw, x.T @ dy)):
        assert np.array_equal(mine, summa.block(whole, grid)), name
    return ledger.sent(operation="broadcast")[1]


def summa_is_a_product(world, case: Case):
    """Every rank's blocks, and the bytes of all: each step is done by one copy."""
    sent = sum(world.run(program, case.q * case.q * case.depth, case))
    assert sent == 8 * summa.sent_forward(case.tokens, case.inner, case.out, case.q)


def test_summa(world):
    check(world, summa_is_a_product, cases(18 if world.kind == "threads" else 4), examples=40)
