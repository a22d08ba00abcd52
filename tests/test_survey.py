"""The survey's tables, in their corrected form, are what the layers send: counted, forward and backward, for even and uneven sizes."""
import numpy as np
import pytest

from refpar import watch
from refpar.comm import collectives
from refpar.comm.mesh import Axis, Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import Model, shares
from refpar.nn.gradient import zeros_like
from refpar.nn.init import initial
from refpar.oracle.packed import packed
from refpar.parallel import fill
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut
from refpar.plan.survey import COLLECTIVES, ROWS, Sizes

SIZES = dict(blocks=1, width=48, heads=12, kv_heads=6, head_width=8, ssm_heads=12, ssm_head_width=4, groups=6, state=16, chunk=16)
MODELS = {"attention": Model(**SIZES), "mamba2": Model(pattern=("mamba2",), **SIZES)}


def one_layer(wire, kind: str, layout, length: int):
    """Elements that this rank sends, forward and backward, on the axis that cuts the layer."""
    config, mesh = MODELS[kind], Mesh(layout, wire)
    chain = fill.model(config, mesh)
    params = initial(config, chain, 0, np.float64, cut=lambda name, dims: cut(config, dims, mesh), rough=True)
    name, layer = chain.layers[1]
    batch = part_of(packed([0], 2, length, 9, (50,)), way_of(config, layout), mesh.axis("cp"))
    x = np.ones((*fill.tokens_here(mesh)(batch).tokens.shape, config.width))
    with watch.watching(watch.Ledger()) as forward:
        y, after, saved = layer.forward(x, params[name], batch, layer.start(params[name], batch))
    with watch.watching(watch.Ledger()) as backward:
        layer.backward(y, zeros_like(after), saved, params[name], batch)
    return [ledger.sent()[1] / 8 for ledger in (forward, backward)]


@pytest.mark.parametrize("length", [360, 331], ids=["even", "uneven"])
@pytest.mark.parametrize("ranks", [2, 3, 6])
@pytest.mark.parametrize("row", ROWS, ids=[f"{row.table} {row.strategy}" for row in ROWS])
def test_rows_of_tables_3_and_8(row, ranks, length):
    """Arrays are long enough for rings; where the table chooses doubling, it sends more in fewer messages."""
    told = ThreadWorld().run(one_layer, ranks, row.kind, row.layout(ranks), length)
    forward, backward = (sum(sent) for sent in zip(*told))
    promised = row.sent(Sizes.of(MODELS[row.kind], 2, length), ranks)
    assert forward == pytest.approx(promised, rel=1e-12) and backward == pytest.approx(row.backward * promised, rel=1e-12)


def call(wire, operation: str, elements: int):
    """One collective, in a ring; what this rank sends."""
    axis = Axis.world(wire)
    x, sizes = np.zeros((elements, axis.size)), shares(elements, axis.size)
    with watch.watching(watch.Ledger()) as ledger:
        if operation == "all_to_all":
            collectives.all_to_all(x[:sizes[axis.index]], axis, 1, [1] * axis.size, 0, sizes)
        elif operation == "all_gather":
            collectives.all_gather(x[:sizes[axis.index], 0], axis, 0, sizes, algorithm="ring")
        elif operation == "reduce":
            collectives.reduce(x[:, 0].copy(), axis)
        else:
            getattr(collectives, operation)(x[:, 0].copy(), axis, algorithm="ring")
    return ledger.sent()[1] / 8


@pytest.mark.parametrize("elements", [24, 25])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_rows_of_table_2(operation, ranks, elements):
    sent = sum(ThreadWorld().run(call, ranks, operation, elements))
    T = elements * ranks if operation == "all_to_all" else elements
    assert sent == COLLECTIVES[operation][1](T, ranks)
