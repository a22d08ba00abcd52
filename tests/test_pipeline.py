"""The runner obeys any schedule: gradients are those of one place, slices included, and its time on the clock is the schedule's."""
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from drawn import check, first
from hypothesis import given
from hypothesis import strategies as st
from strategies_pp import situations

from refpar import watch
from refpar.clock import ClockWorld, Link, everywhere, peak
from refpar.clock import given as costing
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import SCHEDULES, Layout, Model, Training
from refpar.corpus import micro_batches
from refpar.nn.build import build
from refpar.nn.init import initial
from refpar.oracle.packed import packed
from refpar.oracle.properties_pp import in_flight_is_the_formula, pipeline_equals_one_place, run_rank
from refpar.oracle.situation import Situation
from refpar.parallel.stages import cuts, stage_layers
from refpar.plan.bubble import Sizes, bubble
from refpar.schedules.model import part_of_model, schedule_of
from refpar.schedules.simulate import Costs, simulate

TINY = dict(blocks=2, vocab=11, width=6, heads=2, kv_heads=1, head_width=4, ffn=5, ssm_heads=2, ssm_head_width=3, groups=1, state=3,
            inner=5, dt_rank=2, conv=3, chunk=4, tied=True)
MODELS = {"llama": Model(**TINY), "hybrid": Model(pattern=("mamba2", "attention", "mamba1"), **TINY),
          "gpt2": Model(norm="layer", positions="learned", longest=16, attention_bias="all", mlp="gelu", mlp_bias=True, **TINY)}
ALONE = Training(steps=1, rows=3, sequence=3, micro_batches=3, warmup=0, dtype="float64")


def batch_of(model, rows, sequence):
    return packed([3], rows, sequence, model.vocab, (5, 9), (0.0, 0.4))


def test_a_pipeline_is_the_model_in_one_place(world):
    """Every schedule and option; on threads ranks go on in a drawn order, and every send may wait for its receive."""
    check(world, pipeline_equals_one_place, situations(4), examples=60 if world.kind == "threads" else 10)


def test_what_is_in_flight_is_the_formula(world):
    check(world, in_flight_is_the_formula, situations(4), examples=30 if world.kind == "threads" else 6)


@pytest.mark.parametrize("micros", [1, 3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_in_flight_on_four_ranks(schedule, micros):
    layout = Layout(pp=4, schedule=schedule)
    in_flight_is_the_formula(ThreadWorld(), Situation(MODELS["llama"], layout, replace(ALONE, rows=micros, micro_batches=micros)))


def empty_stage(situation):
    layout = situation.layout
    chain = build(situation.model)
    depth = schedule_of(layout, 1).depth
    return any(not chain.layers[part] for part in stage_layers(chain, depth, layout.stages_by_cost))


DRAWN = situations(4)
CORNERS = {
    "a stage without layers": empty_stage,
    "more stages than micro-batches": lambda s: s.training.micro_batches < s.layout.pp,
    "an empty micro-batch": lambda s: s.training.micro_batches > s.training.rows,
    "an empty slice": lambda s: s.layout.slices > s.training.sequence,
    "a slice between two others, of a state": lambda s: s.layout.slices == 3 <= s.training.sequence and "mamba2" in s.model.pattern,
    "a table that two ranks share": lambda s: s.model.tied and s.layout.pp > 1 and s.layout.schedule == "1f1b",
    "a table whose two stages stand on one rank": lambda s: s.model.tied and s.layout.pp > 1 and s.layout.schedule == "zb-v",
    "a copy without micro-batches": lambda s: s.layout.schedule == "dualpipe" and s.training.micro_batches == 1,
    "dropout, drawn again for backward": lambda s: s.model.dropout and s.layout.recompute == "full" and s.layout.pp > 1,
    "a micro-batch without targets": lambda s: 1.0 in s.ignored and s.training.micro_batches > 2,
    "stages that stand on several ranks of tp": lambda s: s.layout.tp > 1,
}


@pytest.mark.parametrize("corner", CORNERS)
def test_drawn_pipelines_reach(corner):
    assert first(DRAWN, CORNERS[corner]) is not None


@pytest.mark.parametrize("layout, sentence", [
    (dict(pp=3, schedule="dualpipe"), "3 ranks must be an even number"),
    (dict(pp=3, schedule="gpipe", virtual_stages=2), "2 virtual stages were asked for, and it has 1"),
    (dict(pp=3, schedule="zb-v", virtual_stages=3), "its V has 2 on each rank"),
    (dict(pp=3, schedule="1f1b", slices=2), "2 slices were asked for, and it has 1")])
def test_what_cannot_be_is_refused_before_a_message_is_sent(layout, sentence):
    ledgers = []
    with pytest.raises(ValueError, match=sentence):
        ThreadWorld().run(told, 3, Situation(MODELS["llama"], Layout(**layout), ALONE), ledgers)
    assert ledgers and not any(ledger.messages for ledger in ledgers)


def told(wire, situation, ledgers):
    with watch.watching(watch.Ledger()) as ledger:
        ledgers.append(ledger)
        run_rank(wire, situation)


OPTIONS = [(name, {}) for name in SCHEDULES] + [("interleaved", {"virtual_stages": 3}), ("sliced", {"slices": 3})]


@pytest.mark.parametrize("latency", [0, Fraction(1, 3)])
@pytest.mark.parametrize("pp, micros", [(2, 4), (4, 4), (4, 9)])
@pytest.mark.parametrize("schedule, options", OPTIONS)
def test_the_real_program_takes_the_schedule_s_time(schedule, options, pp, micros, latency):
    """On the virtual clock, F, B and W costing given times: each rank's work, from its first op to its last, is the simulated one,
    and so is the makespan; without latency the bubble is the closed formula's, where there is one."""
    times = {"F": Fraction(3), "B": Fraction(4), "W": Fraction(2)}
    layout, made = Layout(pp=pp, schedule=schedule, **options), schedule_of(Layout(pp=pp, schedule=schedule, **options), micros)
    clocks = clocks_of(layout, micros, costing(times), latency)
    line = simulate(made, Costs(**times, latency=latency))
    assert max(clock.now for clock in clocks) == line.makespan
    assert [clock.busy for clock in clocks] == line.busy and spans(clocks) == line.spans
    sizes = Sizes(pp, micros, made.depth // pp, made.slices)
    formula = bubble(schedule, sizes, *(time * sizes.v * sizes.K for time in times.values()))
    assert latency or formula in (None, max(spans(clocks)) - min(clock.busy for clock in clocks))


@pytest.mark.parametrize("schedule, options", OPTIONS)
def test_the_real_program_s_bubble_is_the_closed_formula(schedule, options):
    """Where F, B and W take as long and micro-batches are many every schedule has a formula, and every one is met."""
    layout = Layout(pp=4, schedule=schedule, **options)
    clocks, made = clocks_of(layout, 12, costing({"F": 1, "B": 1, "W": 1})), schedule_of(layout, 12)
    share = made.depth // 4 * made.slices
    formula = bubble(schedule, Sizes(4, 12, made.depth // 4, made.slices), share, share, share)
    assert formula is not None and max(spans(clocks)) - min(clock.busy for clock in clocks) == formula


def clocks_of(layout, micros, seconds, latency=0):
    """Those of the ranks, after one step of as many rows."""
    world = ClockWorld(everywhere(Link(latency=latency)), seconds, eager=2**31)
    world.run(step_alone, layout.pp, MODELS["llama"], layout, Training(rows=micros, sequence=3, micro_batches=micros, dtype="float64"))
    return world.clocks


def spans(clocks):
    """From the first op of each rank to the end of its last."""
    ops = [[event for event in clock.events if event["cat"] == "op"] for clock in clocks]
    return [max(op["ts"] + op["dur"] for op in row) - min(op["ts"] for op in row) for row in ops]


class Phases(watch.Observer):
    """The FLOPs of one rank's F, B and W."""

    def __init__(self):
        self.now, self.flops = None, {"F": 0, "B": 0, "W": 0}

    def op(self, name, flops):
        self.now = name if name in self.flops else self.now
        self.flops[self.now] += flops


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_a_slow_rank_shows_by_its_counted_flops(schedule):
    """Counted FLOPs over a peak, of which one rank has a third: the program takes what its own FLOPs say, that rank has the most to
    do, though the other has the head, and the other waits for it."""
    layout, micros, slow = Layout(pp=2, schedule=schedule), 7, 0
    counted = ThreadWorld().run(phases, 2, layout, micros)
    speeds = [300, 900]
    costs = Costs(*([Fraction(flops[kind], micros * speed) for flops, speed in zip(counted, speeds)] for kind in "FBW"))
    clocks = clocks_of(layout, micros, peak(900, {slow: 300}))
    assert max(clock.now for clock in clocks) == simulate(schedule_of(layout, micros), costs).makespan
    even = clocks_of(layout, micros, peak(900))
    assert max(clocks, key=lambda clock: clock.busy).rank == slow != max(even, key=lambda clock: clock.busy).rank
    assert clocks[1].busy == even[1].busy and clocks[1].waited > even[1].waited


def phases(wire, layout, micros):
    with watch.watching(Phases()) as told:
        step_alone(wire, MODELS["llama"], layout, Training(rows=micros, sequence=3, micro_batches=micros, dtype="float64"))
    return told.flops


def step_alone(wire, model, layout, training):
    """The work of a step, without the reductions behind it."""
    mesh = Mesh(layout, wire)
    chain, work = part_of_model(model, mesh, training)
    batch = batch_of(model, training.rows, training.sequence)
    batches = [batch.cut(rows)._replace(whole=batch.cut(rows)) for rows in micro_batches(training.rows, 1, 0, training.micro_batches)]
    work(chain, initial(model, chain, 0, np.float64), batches, batch.count)


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 6))
def test_stages_cover_the_layers(costs, stages):
    found = cuts(costs, stages)
    assert [i for part in found for i in range(len(costs))[part]] == list(range(len(costs))) and len(found) == stages


def test_ends_belong_to_the_ends():
    chain = build(replace(MODELS["llama"], blocks=1))
    parts = stage_layers(chain, 5)
    assert parts[0].start == 0 and parts[4].stop == len(chain.layers) and parts[4].start <= len(chain.layers) - 2
