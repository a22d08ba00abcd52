"""Formulas of memory, traffic and work beside what was counted, layer by layer and for every option; and what ranks do twice."""
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import models, situations

from refpar import watch
from refpar.comm.threads import ThreadWorld
from refpar.config import FAMILIES, PRESETS, Layout, Model
from refpar.nn import chain as chains
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients, zeros_like
from refpar.nn.init import initial
from refpar.oracle.books import shapes_of, work_of
from refpar.oracle.packed import packed
from refpar.oracle.run import batches_of, run_sharded
from refpar.oracle.situation import PROOF, Situation
from refpar.plan import activations, flops, products, published, traffic


@settings(max_examples=60)
@given(models(), st.integers(0, 3), st.integers(1, 9))
def test_what_a_single_process_keeps_is_the_table(model, rows, columns):
    """In sum as the ledger counts it, and layer by layer; the head's soft cap keeps the logits that the loss keeps."""
    batch, chain = packed(0, max(rows, 1), columns, model.vocab, (3, 4)).cut(slice(0, rows)), build(model)
    params = initial(model, chain, 0, np.float32)
    with watch.watching(watch.Ledger()) as ledger:
        loss_and_gradients(chain, params, batch, 1)
    spot = activations.Spot(model, Layout(), 0, 0, rows, columns)
    assert ledger.peak["saved"] == activations.saved_elements(spot)
    _, _, saved = chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))
    for name, points in saved.items():
        counted = watch.elements({point: array for point, array in points.items() if point != "cap"})
        assert counted == activations.kept_elements(spot, name.partition(".")[2]), name


@settings(max_examples=60)
@given(models(), st.integers(0, 3), st.integers(1, 9))
def test_what_is_left_for_the_weights_gradients_is_the_table(model, rows, columns):
    """Layer by layer, each array once, and no array by two layers."""
    batch, chain = packed(0, max(rows, 1), columns, model.vocab, (3, 4)).cut(slice(0, rows)), build(model)
    params = initial(model, chain, 0, np.float32)
    logits, after, saved = chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))
    _, _, left = chains.backward(chain, np.ones_like(logits), saved, params, batch, zeros_like(after))
    spot = activations.Spot(model, Layout(), 0, 0, rows, columns)
    formulas = {name: products.left_elements(spot, name.partition(".")[2]) for name in left}
    assert {name: watch.elements(arrays) for name, arrays in left.items()} == formulas
    assert watch.elements(left) == sum(formulas.values())


@pytest.mark.parametrize("name", [f"{family}-uneven" for family in FAMILIES])
def test_points_of_the_table_are_points_of_saved(name):
    """Every name stands in `saved`, with the shape that the table says."""
    model = dataclasses.replace(PRESETS[name], blocks=1)
    batch, chain = packed(0, 2, 16, model.vocab), build(model)
    params = initial(model, chain, 0, np.float32)
    _, _, saved = chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))
    for layer, points in saved.items():
        kind = layer.partition(".")[2]
        for point, shape in activations.kept(model, kind).items():
            array = points
            for part in point.split("."):
                array = array[part]
            assert array.size == activations.elements(activations.Spot(model, Layout(), 0, 0, 2, 16), kind, shape), (layer, point)


@settings(max_examples=30)
@given(models(), st.integers(0, 3), st.integers(1, 9))
def test_work_of_a_single_process_is_the_formula(model, rows, columns):
    """In sum, and by each op: the linear maps' three, and the terms of attention and scans under the names of their ops."""
    batch = packed(0, max(rows, 1), columns, model.vocab, (3, 4)).cut(slice(0, rows))
    batch = batch._replace(whole=batch)
    chain = build(model)
    with watch.watching(watch.Ledger()) as ledger:
        loss_and_gradients(chain, initial(model, chain, 0, np.float32), batch, 1)
    work = flops.work(activations.Spot(model, Layout(), 0, 0, rows, columns), batch, np.float32, tuple(activations.kinds(model)))
    assert sum(work.values()) == sum(ledger.flops.values())
    for op in ("C B'", "(C B' o decay) X", "chunk states", "inter-chunk", "C h", "B X"):
        assert sum(count for term, count in work.items() if term.split(" ", 1)[1] == op) == ledger.flops.get(op, 0), op
    assert ledger.flops["linear"] == ledger.flops["input gradient"] == ledger.flops["weight gradient"]


@settings(max_examples=30)
@given(situations(8))
def test_repeated_work_is_that_of_shared_groups(situation):
    """Beyond the single process's there is the work on what a run's ranks each hold, and no other, but for attention's pairs and,
    where cp or slices cut the rows, or heads are dealt out, the scans."""
    situation = dataclasses.replace(situation, layout=dataclasses.replace(situation.layout, recompute="none"))
    model, tp = situation.model, situation.layout.tp
    ranks = flops.added([work_of(situation, rank) for rank in range(situation.layout.ranks)])
    one = work_of(Situation(model, Layout(), dataclasses.replace(situation.training, micro_batches=1), situation.last_rows,
                            situation.documents, situation.ignored), 0)
    units = {"attention k": model.kv_heads, "attention v": model.kv_heads} | {
        f"mamba2 {term}": model.groups for term in ("B", "C", "C B'")}
    for term, work in one.items():
        matrix = term.split(" ", 1)[1] in flops.matrices(model, term.split(" ", 1)[0])
        whole_rows = situation.layout.cp == 1 and situation.layout.schedule != "sliced" and situation.layout.cp_mamba != "heads"
        if matrix or whole_rows and term != "attention pairs of tokens":
            shared = units.get(term, tp)
            assert ranks[term] * shared == work * max(shared, tp), term


MODEL = dataclasses.replace(PRESETS["hybrid-uneven"], blocks=1)


@pytest.mark.parametrize("layout", [Layout(tp=3), Layout(tp=3, sp=True), Layout(dp=2, tp=2, sp=True), Layout(tp=5)], ids=str)
def test_each_collective_sends_what_its_line_says(layout):
    """Not only in sum: by axis and operation, on each rank."""
    situation = Situation(MODEL, layout, dataclasses.replace(PROOF, steps=1, rows=3, sequence=16), documents=(5, 16))
    chain = build(MODEL)
    for rank, run in enumerate(ThreadWorld().run(run_sharded, layout.ranks, situation)):
        mesh = traffic.mesh_of(layout, rank)
        rows = [batch.whole.tokens.shape for batch in batches_of(situation, mesh, 0)]
        promised: dict = {}
        for sent in traffic.step(MODEL, mesh, chain, shapes_of(MODEL, chain, mesh, np.dtype(np.float64)), rows, np.float64):
            key = sent.axis, sent.what.partition(": ")[2]
            promised[key] = promised.get(key, 0) + sent.bytes
        counted = {key: size for key, (_, size) in run.sent.items()}
        assert {key: size for key, size in promised.items() if size} == {key: size for key, size in counted.items() if size}


def test_mamba1_has_two_sums_a_layer_more_than_mamba2_and_attention():
    """Mamba-1 completes dt, B and C on the way, and Mamba-2 nothing while a rank's groups are whole."""
    here = traffic.Here(PRESETS["hybrid-tiny"], traffic.mesh_of(Layout(tp=2), 0), 2, 8, np.float32)
    sends = {kind: [sent.bytes for sent in traffic.LAYERS[kind](here) if sent.bytes] for kind in ("attention", "mlp", "mamba1", "mamba2")}
    assert [len(sends[kind]) for kind in sends] == [2, 2, 4, 2]
    whole = 4 * 2 * 8 * here.model.width
    assert sends["attention"] == sends["mlp"] == sends["mamba2"] == [whole, whole]     # 2 (p-1)/p of the whole, with p = 2
    assert sends["mamba1"].count(4 * 2 * 8 * (here.model.dt_rank + 2 * here.model.state)) == 2


GPT = Model(width=32, heads=4, kv_heads=4, head_width=8, ffn=128, norm="layer", mlp="gelu_tanh", positions="learned", longest=64)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("cp, way", [(1, "ring"), (2, "ring"), (4, "zigzag"), (2, "gather"), (2, "ulysses"), (4, "ulysses+ring")])
@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_the_published_formula_of_activations_differs_by_the_terms_that_are_named(tp, sp, cp, way, recompute):
    """Which are all: masks of dropout, pairs of tokens, the gathered inputs, and Ulysses' second form of the core's output."""
    model = dataclasses.replace(GPT, heads=16, kv_heads=16, head_width=2)                   # a whole head for each of tp x cp
    told = published.compared(model, Layout(tp=tp, sp=sp, cp=cp, cp_attention=way, recompute=recompute), 48, 2)
    assert told.ours == pytest.approx(told.by_terms)
    assert told.small < told.ours


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(cp=2), Layout(tp=2, cp=2, cp_attention="ulysses"),
                                    Layout(tp=2, recompute="selective"), Layout(tp=2, cp=2, recompute="full")], ids=str)
def test_what_is_compared_with_the_published_formula_was_counted(layout):
    """The ledger of a real run: what two blocks keep beyond one block, on the first rank, is what a layer of each kind keeps."""
    def peak(blocks):
        model = dataclasses.replace(GPT, blocks=blocks)
        situation = Situation(model, layout, dataclasses.replace(PROOF, steps=1, rows=2, sequence=48))
        return ThreadWorld().run(run_sharded, layout.ranks, situation)[0].peak["saved"]
    told = published.compared(GPT, layout, 48, 2)
    assert published.NUMBER * (peak(2) - peak(1) - told.small) == told.ours


@pytest.mark.parametrize("recompute, theirs, ours", [("none", 6, 7), ("full", 8, 9)])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, sp=True), Layout(dp=2, pp=2)], ids=str)
def test_the_published_operations_of_a_step_were_counted(layout, recompute, theirs, ours):
    """All ranks of a real run together; rows of one block, so that all pairs are looked at, with their scores computed again."""
    layout = dataclasses.replace(layout, recompute=recompute)
    situation = Situation(GPT, layout, dataclasses.replace(PROOF, steps=1, rows=2, sequence=48))
    counted = sum(sum(run.flops.values()) for run in ThreadWorld().run(run_sharded, layout.ranks, situation))
    pairs = 2 * 48 * 48 * GPT.width * GPT.blocks * 2                        # one product over all pairs, of 2 rows
    assert counted == published.step_flops(GPT, 48, 2, recompute) + (ours - theirs) * pairs
