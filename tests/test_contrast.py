"""What is not the core's, held to what it claims: PipeDream is delayed gradients and no synchronous step; post-validation is the step."""
import math
from dataclasses import replace

import numpy as np
import pytest
from test_pipeline import MODELS, batch_of

from refpar.clock import ClockWorld
from refpar.clock import given as costing
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import Layout, Training
from refpar.contrast.pipedream import Asynchronous, delayed, two_buffered
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients, zeros_like
from refpar.nn.init import initial
from refpar.nn.optimizer import clipped, updated
from refpar.oracle.equal import assert_equal, leaves
from refpar.parallel.data import reduce_gradients
from refpar.parallel.placement import cut, squared_norm
from refpar.plan.bubble import Sizes, held
from refpar.parallel.stages import on_rank, stage, stage_layers
from refpar.schedules.generate import generate
from refpar.schedules.model import part_of_model
from refpar.schedules.post_validation import hoped, post_validated, stepped, validated
from refpar.train import State, rate_of

MODEL, MICROS = replace(MODELS["llama"], tied=False), 5


def asynchronous(wire, model=MODEL, name="pipedream"):
    """One rank of the pipeline: its weights at the end, and how many versions of them it had to keep."""
    pp, chain, schedule = Mesh(Layout(pp=wire.size), wire).axis("pp"), build(model), generate(name, wire.size, MICROS)
    parts = stage_layers(chain, wire.size)
    params = initial(model, on_rank(chain, parts, schedule.places, pp.index), 0, np.float64, rough=True)
    runner = Asynchronous(schedule, {pp.index: stage(chain, parts[pp.index])}, params, [[batch] for batch in batches()], 20, pp,
                          lambda batch: batch, np.dtype(np.float64))
    runner.run()
    return runner.params, runner.versions


def batches():
    whole = batch_of(MODEL, 2 * MICROS, 6)
    return [whole.cut(slice(2 * i, 2 * i + 2)) for i in range(MICROS)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pipedream_is_delayed_gradients_and_not_the_synchronous_run(ranks):
    chain = build(MODEL)
    params = initial(MODEL, chain, 0, np.float64, rough=True)
    expected = dict(leaves(delayed(chain, params, batches(), 20, ranks, 0.1)))
    told = ThreadWorld().run(asynchronous, ranks)
    assert [versions for _, versions in told] == list(held("pipedream", Sizes(ranks, MICROS)))
    found = {name: w for mine, _ in told for name, w in leaves(mine)}
    assert found.keys() == expected.keys()
    for name, w in found.items():
        assert_equal(w, expected[name], n=12 * MODEL.vocab * MICROS, scale=max(1, np.abs(w).max()), name=name)
    for batch in batches():                                     # one after another, each with the newest weights
        _, grads = loss_and_gradients(chain, params, batch, 20)
        params = {layer: {name: w - 0.1 * grads[layer][name] for name, w in group.items()} for layer, group in params.items()}
    apart = max(float(np.abs(w - found[name]).max()) for name, w in leaves(params))
    assert apart < 1e-12 if ranks == 1 else apart > 1e-6


@pytest.mark.parametrize("model, name, sentence", [(MODEL, "1f1b", "has no end of a step, and schedule 1f1b has one"),
                                                   (replace(MODEL, tied=True), "pipedream", "is tied, and its two stages")])
def test_what_pipedream_cannot_do_is_refused(model, name, sentence):
    with pytest.raises(ValueError, match=sentence):
        ThreadWorld().run(asynchronous, 2, model, name)


def two_versions(wire, steps):
    """2BW on the stages of a 1F1B pipeline: this rank's weights after each step."""
    mesh = Mesh(Layout(pp=wire.size), wire)
    chain, work = part_of_model(MODEL, mesh, Training(rows=2 * MICROS, sequence=6, micro_batches=MICROS, dtype="float64"))
    params = initial(MODEL, chain, 0, np.float64, rough=True)
    pieces = [batch._replace(whole=batch) for batch in batches()]
    return two_buffered(lambda weights, step: work(chain, weights, pieces, 20)[1], params, steps, 0.1)


def test_2bw_is_one_step_of_delay():
    chain, whole = build(MODEL), batch_of(MODEL, 2 * MICROS, 6)
    params = initial(MODEL, chain, 0, np.float64, rough=True)

    def descent(weights, at):
        _, grads = loss_and_gradients(chain, at, whole, 20)
        return {layer: {name: w - 0.1 * grads[layer][name] for name, w in group.items()} for layer, group in weights.items()}
    first = descent(params, params)
    third = descent(descent(first, params), first)              # w2 = w1 - g(w0), w3 = w2 - g(w1)
    synchronous = descent(descent(first, first), descent(first, first))
    found = {name: w for told in ThreadWorld().run(two_versions, 3, 3) for name, w in leaves(told[2])}
    for name, w in leaves(third):
        assert_equal(found[name], w, n=12 * MODEL.vocab * MICROS, scale=max(1, np.abs(w).max()), name=name)
    assert max(float(np.abs(w - found[name]).max()) for name, w in leaves(synchronous)) > 1e-6


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [0.0, 1e-3, 1e3])
def test_post_validation_is_the_ordinary_step(optimizer, clip):
    training = Training(optimizer=optimizer, clip=clip, warmup=0, dtype="float64")
    chain = build(MODEL)
    params = initial(MODEL, chain, 0, np.float64, rough=True)
    state = State(params, zeros_like(params), zeros_like(params))
    batch = batches()[0]
    _, grads = loss_and_gradients(chain, params, batch, batch.count)
    norm = math.sqrt(sum(float((grad ** 2).sum()) for _, grad in leaves(grads)))
    after, back = post_validated(state, grads, lambda: norm, training)
    expected = State(*updated(params, clipped(grads, norm, clip), state.m, state.v, 0, rate_of(0, training), training))
    assert back == (0 < clip < norm) and after.step == 1
    for (name, one), (_, other) in zip(leaves(after._asdict() | {"step": np.ones(1)}), leaves(expected._asdict() | {"step": np.ones(1)})):
        assert one.tobytes() == other.tobytes(), name
    for wrong in (math.nan, math.inf):
        same, back = post_validated(state, grads, lambda: wrong, training)      # noqa: B023
        assert back and same is state


def steps(wire, layout, training, spoilt):
    """Two steps of a rank with post-validation, and two ordinary ones: (state, norm, was it taken back?) of each."""
    mesh = Mesh(layout, wire)
    chain, work = part_of_model(TIED, mesh, training)
    params = initial(TIED, chain, 0, np.float64, lambda name, dims: cut(TIED, dims, mesh), rough=True)
    hopeful = ordinary = State(params, zeros_like(params), zeros_like(params))
    pieces, told = [batch._replace(whole=batch) for batch in batches()], []
    for _ in range(2):
        _, grads = work(chain, hopeful.params, pieces, 20)
        grads = reduce_gradients(grads, chain, mesh)
        if spoilt and mesh.axis("pp").index == spoilt:
            layer = max(grads)
            grads[layer] = {name: grad * np.nan for name, grad in grads[layer].items()}
        hope = hoped(hopeful, grads, chain, mesh, training)
        norm = math.sqrt(squared_norm(grads, chain, mesh))
        ordinary = stepped(hopeful, clipped(grads, norm, training.clip), training)
        hopeful, back = validated(hope, mesh, training)
        told.append((hope, hopeful, ordinary, norm, back))
    return told


TIED = MODELS["llama"]


@pytest.mark.parametrize("layout", [Layout(pp=3, schedule="zb-h2"), Layout(pp=2, tp=2, sp=True, schedule="zb-h2"),
                                    Layout(pp=4, schedule="dualpipe"), Layout(pp=2, schedule="zb-v")], ids=str)
@pytest.mark.parametrize("clip", [0.0, 1e-3, "between", 1e3])
def test_stages_that_hope_take_the_ordinary_step(world, layout, clip):
    """Whatever the stages know when they step.  Between: the first stage's own norm is below the threshold, and the whole is above,
    so that its step has to be taken back."""
    training = Training(optimizer="adamw", warmup=0, rows=2 * MICROS, sequence=6, micro_batches=MICROS, dtype="float64",
                        clip=0.0 if clip == "between" else clip)
    if clip == "between":
        hopes = [told[0] for told in world.run(steps, layout.ranks, layout, training, None)]
        squares = sorted({hope.square for hope, *_ in hopes})
        training = replace(training, clip=math.sqrt((squares[0] + squares[-1]) / 2))
    backs = set()
    for told in world.run(steps, layout.ranks, layout, training, None):
        for hope, found, expected, norm, back in told:
            assert (hope.after is None or back) == (0 < training.clip < norm)
            backs.add(back)
            for (name, one), (_, other) in zip(leaves(found.params), leaves(expected.params)):
                assert_equal(one, other, n=12 * TIED.vocab * MICROS, scale=max(1, np.abs(one).max()), name=name)
    assert clip != "between" or True in backs, "somebody hoped in vain"


def test_a_gradient_that_is_not_finite_leaves_every_stage_as_it_was(world):
    layout = Layout(pp=3, schedule="zb-h2")
    training = Training(warmup=0, rows=2 * MICROS, sequence=6, micro_batches=MICROS, dtype="float64", clip=0.0)
    for rank, told in enumerate(world.run(steps, 3, layout, training, 1)):
        hope, found, _, norm, back = told[0]
        assert math.isnan(norm) and back == (rank == 0) == (hope.after is not None)
        for (name, one), (_, other) in zip(leaves(found.params), leaves(hope.before.params)):
            assert one.tobytes() == other.tobytes(), name


def when(wire, hopes):
    """Each rank's time when its own work ends, and when it has taken its step."""
    layout = Layout(pp=wire.size, schedule="zb-h2")
    mesh, training = Mesh(layout, wire), Training(rows=8, sequence=3, micro_batches=8, dtype="float64")
    chain, work = part_of_model(MODEL, mesh, training)
    params = initial(MODEL, chain, 0, np.float64)
    whole = batch_of(MODEL, 8, 3)
    rows = [whole.cut(slice(i, i + 1)) for i in range(8)]
    _, grads = work(chain, params, [row._replace(whole=row) for row in rows], 20)
    clock, state = wire.baton.clocks[wire.rank], State(params, zeros_like(params), zeros_like(params))
    done = clock.now
    if hopes:
        hoped(state, grads, chain, mesh, training)
    else:
        squared_norm(grads, chain, mesh)
    return done, clock.now


def test_who_hopes_does_not_wait():
    """ZB-H2 on the virtual clock: each rank ends a forward later than the one before it, and steps when it ends.  With the norm first,
    all wait for the last."""
    at_once = ClockWorld(seconds=costing({"F": 1, "B": 1, "W": 1})).run(when, 4, True)
    waiting = ClockWorld(seconds=costing({"F": 1, "B": 1, "W": 1})).run(when, 4, False)
    assert at_once == [(24 + rank, 24 + rank) for rank in range(4)]
    assert waiting == [(24 + rank, 27) for rank in range(4)]
