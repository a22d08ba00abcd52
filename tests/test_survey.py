"""The survey's tables, corrected, are what layers and collectives send: counted, forward and backward, for even and uneven sizes."""
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import models

from refpar import watch
from refpar.algorithms.gather import gather
from refpar.comm import collectives
from refpar.comm.mesh import Axis, Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import CP_ATTENTION, CP_MAMBA, Layout, Model, shares
from refpar.nn.gradient import zeros_like
from refpar.nn.init import initial
from refpar.oracle.packed import packed
from refpar.parallel import fill
from refpar.parallel.data import reduce_gradients
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut
from refpar.plan import survey, traffic, volume
from refpar.plan.survey import ROWS, Sizes

SIZES = dict(blocks=1, width=48, heads=12, kv_heads=6, head_width=8, ssm_heads=12, ssm_head_width=4, groups=6, state=16, chunk=16)
FEW = SIZES | dict(kv_heads=2, groups=2)                # key heads and groups, fewer than ranks
IDS = [f"{row.table or 'none'} {row.kind} {row.strategy}" for row in ROWS]


def model_of(kind: str, sizes: dict) -> Model:
    return Model(pattern=(kind,), **sizes)


def one_layer(wire, config: Model, kind: str, layout: Layout, rows: int, length: int, dtype="float64"):
    """Bytes that this rank sends, forward and backward."""
    mesh = Mesh(layout, wire)
    chain = fill.model(config, mesh)
    params = initial(config, chain, 0, np.dtype(dtype), cut=lambda name, dims: cut(config, dims, mesh), rough=True)
    name, layer = next(found for found in chain.layers if found[0].endswith(f".{kind}"))
    batch = part_of(packed(0, rows, length, 9, (50,)), way_of(config, layout), mesh.axis("cp"))
    x = np.ones((*fill.tokens_here(mesh)(batch).tokens.shape, config.width), dtype)
    with watch.watching(watch.Ledger()) as forward:
        y, after, saved = layer.forward(x, params[name], batch, layer.start(params[name], batch))
    with watch.watching(watch.Ledger()) as backward:
        layer.backward(y, zeros_like(after), saved, params[name], batch)
    return forward.sent()[1], backward.sent()[1]


@pytest.mark.parametrize("length", [180, 163], ids=["even", "uneven"])
@pytest.mark.parametrize("sizes, ranks", [(SIZES, 2), (SIZES, 3), (SIZES, 6), (FEW, 4), (FEW, 6)],
                         ids=["2", "3", "6", "4 share 2", "6 share 2"])
@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_rows_of_tables_3_and_8(row, sizes, ranks, length):
    """All ranks together send the figure, forward and backward, of arrays that are long enough for rings."""
    config = model_of(row.kind, sizes)
    told = ThreadWorld().run(one_layer, ranks, config, row.kind, row.layout(ranks), 2, length)
    z = Sizes.of(config, 2, length)
    for counted, figure in zip(map(sum, zip(*told)), (row.value, row.backward)):
        assert counted / 8 == pytest.approx(ranks * figure(z, ranks), rel=1e-12)


@settings(max_examples=60)
@given(models(), st.integers(2, 8), st.integers(1, 4), st.integers(1, 2**20))
def test_corrections_lead_from_the_printed_figure_to_ours(model, ranks, rows, length):
    """One after the other, for any sizes; and a row that needs none is right as printed."""
    z = Sizes.of(model, rows, length, 4)
    for row in ROWS:
        if row.table:
            assert survey.corrected(row, z, ranks) == pytest.approx(row.value(z, ranks), rel=1e-12), row.strategy


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_no_correction_is_idle(row):
    """Each of them changes the figure somewhere."""
    for step in row.steps:
        sizes = [Sizes.of(model_of(row.kind, few | {"head_width": 6, "ssm_head_width": 8}), 3, 90) for few in (SIZES, FEW)]
        assert any(step.to(7.0, z, 5) != 7.0 for z in sizes), step.why


LAYOUTS = st.one_of(
    st.sampled_from([row.layout for row in ROWS]),
    st.builds(lambda way, mamba: lambda N: Layout(cp=N, cp_attention=way, cp_mamba=mamba),
              st.sampled_from(CP_ATTENTION), st.sampled_from(CP_MAMBA)),
    st.just(lambda N: Layout(tp=N, sp=True, tp_ring=True)),
    st.builds(lambda way, mamba, sp: lambda N: Layout(cp=2, tp=N // 2 or 1, sp=sp, cp_attention=way, cp_mamba=mamba, node=2),
              st.sampled_from(CP_ATTENTION), st.sampled_from(CP_MAMBA), st.booleans()))


@settings(max_examples=60, deadline=None)
@given(models(), LAYOUTS, st.integers(1, 6), st.integers(1, 2), st.integers(1, 40), st.sampled_from(("float64", "float32")))
def test_each_rank_sends_what_the_formula_says(model, layout, ranks, rows, length, dtype):
    """By every way, of any sizes; short arrays too, which all_reduce doubles."""
    model, layout = dataclasses.replace(model, blocks=1, longest=40), layout(ranks)
    for kind in dict.fromkeys(model.pattern):
        for rank, counted in enumerate(ThreadWorld().run(one_layer, layout.ranks, model, kind, layout, rows, length, dtype)):
            assert counted == survey.layer_sends(kind, model, layout, rank, rows, length, dtype), (kind, layout, rank)


def summed(wire, config: Model, layout: Layout):
    """Bytes that this rank sends to sum the gradients of the one mixer, and as the formula of its buckets says."""
    mesh = Mesh(layout, wire)
    chain = fill.model(config, mesh)
    chain = chain._replace(layers=chain.layers[1:2])
    params = initial(config, chain, 0, np.float64, cut=lambda name, dims: cut(config, dims, mesh))
    with watch.watching(watch.Ledger()) as ledger:
        reduce_gradients(params, chain, mesh)
    return ledger.sent()[1], sum(one.bytes for one in traffic.gradients(mesh, chain, params))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("layout", [survey.dp, survey.cp()], ids=["dp", "cp"])
@pytest.mark.parametrize("kind", ["attention", "mlp", "mamba2"])
def test_gradients_are_summed_once_a_step_over_dp_and_over_cp_alike(kind, layout, ranks):
    """Of which the survey names the first."""
    config = model_of(kind, SIZES | {"width": 96})
    told = ThreadWorld().run(summed, ranks, config, layout(ranks))
    assert all(counted == formula for counted, formula in told)
    figure = ranks * survey.gradients(config, kind, ranks) * 8
    assert sum(counted for counted, _ in told) == pytest.approx(figure, rel=1e-12)


def call(wire, operation: str, elements: int):
    """One collective, as table 2 means it; what this rank sends and receives."""
    axis = Axis.world(wire)
    x, sizes = np.zeros((elements, axis.size)), shares(elements, axis.size)
    mine = sizes[axis.index]
    calls = {"all_to_all": lambda: collectives.all_to_all(x[:mine], axis, 1, [1] * axis.size, 0, sizes),
             "all_gather": lambda: collectives.all_gather(x[:mine, 0], axis, 0, sizes, algorithm="ring"),
             "gather": lambda: gather(x[:mine, 0], axis, 0, sizes), "reduce": lambda: collectives.reduce(x[:, 0], axis)}
    with watch.watching(watch.Ledger()) as ledger:
        calls.get(operation, lambda: getattr(collectives, operation)(x[:, 0], axis, algorithm="ring"))()
    return {way: sum(size for key, size in ledger.bytes.items() if key[0] == way) // 8 for way in ("send", "recv")}


@pytest.mark.parametrize("elements", [120, 121])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
@pytest.mark.parametrize("operation", volume.SURVEY)
def test_rows_of_table_2(operation, ranks, elements):
    """The figure, where sizes are even; where they are not, the formula of each rank, and the same in sum."""
    told, row = ThreadWorld().run(call, ranks, operation, elements), volume.SURVEY[operation]
    sizes = shares(elements, ranks)
    for rank, counted in enumerate(told):
        formula = (volume.all_to_all(rank, [1] * ranks, sizes) if operation == "all_to_all"
                   else volume.FORMULAS[operation](rank, sizes))
        assert counted == {"send": formula.elements, "recv": formula.elements_received}
    T = elements * ranks if operation == "all_to_all" else elements
    if row.counts == "received by the root":
        assert told[0]["recv"] == pytest.approx(row.value(ranks, T), abs=1)
    else:
        assert sum(counted["send"] for counted in told) == pytest.approx(ranks * row.value(ranks, T), rel=1e-12)
