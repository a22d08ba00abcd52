"""The runner obeys any schedule: gradients are those of one place, slices included, and its time on the clock is the schedule's."""
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.clock import ClockWorld, Link, everywhere
from refpar.clock import given as costing
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import SCHEDULES, Layout, Model, Training
from refpar.corpus import micro_batches
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients
from refpar.nn.init import initial
from refpar.oracle.equal import assert_equal, leaves
from refpar.oracle.packed import packed
from refpar.parallel.data import reduce_gradients
from refpar.parallel.stages import cuts, stage_layers
from refpar.plan.bubble import Sizes, bubble
from refpar.schedules.model import part_of_model, schedule_of
from refpar.schedules.simulate import Costs, simulate

TINY = dict(blocks=2, vocab=11, width=6, heads=2, kv_heads=1, head_width=4, ffn=5, ssm_heads=2, ssm_head_width=3, groups=1, state=3,
            inner=5, dt_rank=2, conv=3, chunk=4, tied=True)
MODELS = {"llama": Model(**TINY), "hybrid": Model(pattern=("mamba2", "attention", "mamba1"), **TINY),
          "gpt2": Model(norm="layer", positions="learned", longest=16, attention_bias="all", mlp="gelu", mlp_bias=True, **TINY)}


def batch_of(model, rows, sequence):
    return packed([3], rows, sequence, model.vocab, (5, 9), (0.0, 0.4))


def step(wire, model, layout, training):
    """One rank: loss and summed gradients of its part of the model."""
    mesh = Mesh(layout, wire)
    chain, work = part_of_model(model, mesh, training)
    params = initial(model, chain, 0, np.float64, rough=True)
    batch = batch_of(model, training.rows, training.sequence)
    batches = [batch.cut(rows)._replace(whole=batch.cut(rows)) for rows in micro_batches(training.rows, 1, 0, training.micro_batches)]
    loss, grads = work(chain, params, batches, batch.count)
    return loss, reduce_gradients(grads, chain, mesh)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(MODELS)), st.sampled_from([name for name in SCHEDULES if name != "dualpipe"]), st.integers(1, 4),
       st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.booleans(), st.sampled_from((65536, 0)), st.integers(0, 99))
def test_a_pipeline_is_the_model_in_one_place(name, schedule, pp, micros, rows, sequence, by_cost, eager, seed):
    """Fewer micro-batches than stages, empty ones, empty stages, shorter rows than slices; every send may wait for its receive."""
    model = MODELS[name]
    layout = Layout(pp=pp, schedule=schedule, stages_by_cost=by_cost)
    training = Training(rows=rows, sequence=sequence, micro_batches=micros, dtype="float64")
    batch = batch_of(model, rows, sequence)
    chain = build(model)
    loss, whole = loss_and_gradients(chain, initial(model, chain, 0, np.float64, rough=True), batch, batch.count)
    told = ThreadWorld(seed, eager).run(step, pp, model, layout, training)
    assert_equal(np.float64(sum(one for one, _ in told)), np.float64(loss), n=rows * sequence * 11)
    seen = set()
    for _, grads in told:
        for parameter, grad in leaves(grads):
            layer, _, p = parameter.rpartition(".")
            assert_equal(grad, whole[layer][p], n=rows * sequence * 11, scale=max(1, np.abs(whole[layer][p]).max()), name=parameter)
            seen.add(parameter)
    assert seen == {parameter for parameter, _ in leaves(whole)}


@pytest.mark.parametrize("latency", [0, Fraction(1, 3)])
@pytest.mark.parametrize("pp, micros", [(2, 4), (4, 4), (4, 9)])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES])
def test_the_real_program_takes_the_schedule_s_time(schedule, pp, micros, latency):
    """On the virtual clock, F, B and W costing given times: the makespan is the simulated one, and without latency its bubble the
    closed formula's, where there is one."""
    times = {"F": Fraction(3), "B": Fraction(4), "W": Fraction(2)}
    layout = Layout(pp=pp, schedule=schedule)
    world = ClockWorld(everywhere(Link(latency=latency)), costing(times), eager=2**31)
    world.run(step_alone, pp, MODELS["llama"], layout, Training(rows=micros, sequence=3, micro_batches=micros, dtype="float64"))
    made = schedule_of(layout, micros)
    line = simulate(made, Costs(**times, latency=latency))
    assert max(clock.now for clock in world.clocks) == line.makespan
    assert [clock.busy for clock in world.clocks] == line.busy


def step_alone(wire, model, layout, training):
    """The work of a step, without the reductions behind it."""
    mesh = Mesh(layout, wire)
    chain, work = part_of_model(model, mesh, training)
    batch = batch_of(model, training.rows, training.sequence)
    batches = [batch.cut(rows)._replace(whole=batch.cut(rows)) for rows in micro_batches(training.rows, 1, 0, training.micro_batches)]
    work(chain, initial(model, chain, 0, np.float64), batches, batch.count)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_bubble_is_the_closed_formula(schedule):
    line = simulate(schedule_of(Layout(pp=4, schedule=schedule), 8), Costs(3, 4, 2))
    assert line.bubble == bubble(schedule, Sizes(4, 8, 1, 1), 3, 4, 2) == 3 * 9


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 6))
def test_stages_cover_the_layers(costs, stages):
    found = cuts(costs, stages)
    assert [i for part in found for i in range(len(costs))[part]] == list(range(len(costs))) and len(found) == stages


def test_ends_belong_to_the_ends():
    chain = build(replace(MODELS["llama"], blocks=1))
    parts = stage_layers(chain, 5)
    assert parts[0].start == 0 and parts[4].stop == len(chain.layers) and parts[4].start <= len(chain.layers) - 2
