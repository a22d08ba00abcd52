"""Lesson 08: pipelines as data.

What:  Layers are cut into stages, a step into micro-batches.  In which order a rank works on which is a schedule, and a schedule is
       data: printed, checked before the first message, simulated, and then obeyed by one small runner.
Why:   A pipeline moves little, one array a stage, and so is the way across slow links.  What it costs is waiting, the bubble, and
       what micro-batches in flight keep; both follow from the schedule alone, and are measured here on the real program.

Run:   python lessons/08_pipelines.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/08_pipelines.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages of one step
       ... --mine FILE         judge your own one_f_one_b(s): s.p ranks, s.m micro-batches; return {"rows": a list for each rank}, its
                               ops in order, Op("F", rank, micro) and Op("BW", rank, micro) of refpar.parallel.schedule
       ... --fault NAME        plant a real mistake, such as normalised-after-backward: the lesson ends red
"""
from dataclasses import replace
from fractions import Fraction

import numpy as np

from refpar import lesson
from refpar.clock import ClockWorld, Link, everywhere, given
from refpar.comm.mesh import Mesh
from refpar.config import PRESETS, Layout, Training
from refpar.corpus import micro_batches
from refpar.nn.init import initial
from refpar.oracle import faults_pp, properties, properties_pp
from refpar.oracle.packed import packed
from refpar.oracle.situation import PROOF, Situation
from refpar.parallel.schedule import Op
from refpar.plan.bubble import Sizes, bubble
from refpar.schedules.check import check
from refpar.schedules.generate import generate, one_f_one_b
from refpar.schedules.model import part_of_model, schedule_of
from refpar.schedules.simulate import Costs, simulate

MODEL = replace(PRESETS["llama-uneven"], blocks=2, tied=True)
MICROS = 8


def one_step(wire, layout: Layout):
    """The work of one step on this rank, without the sums behind it."""
    mesh, training = Mesh(layout, wire), Training(rows=MICROS, sequence=5, micro_batches=MICROS, dtype="float64")
    chain, work = part_of_model(MODEL, mesh, training)
    batch = packed([0], MICROS, 5, MODEL.vocab, (7,))
    rows = [batch.cut(part) for part in micro_batches(MICROS, 1, 0, MICROS)]
    loss, _ = work(chain, initial(MODEL, chain, 0, np.float64), [one._replace(whole=one) for one in rows], batch.count)
    return {"layers": [name for name, _ in chain.layers], "loss": float(loss)}


def teach(page: lesson.Page):
    p = page.ranks
    told = page.run(one_step, Layout(pp=p))
    page.say(f"1. {len(sum((one['layers'] for one, _ in told), []))} layers on {lesson.count(p, 'stage')}; the last has the loss:")
    for rank, (one, _) in enumerate(told):
        page.say(f"  rank {rank}   {' '.join(one['layers']):<60} loss {one['loss']:>#8.6g}")
    page.show(told, lambda array: f"hidden states or their gradient, {list(array.shape)}")

    page.say("", f"2. The schedule 1F1B, {MICROS} micro-batches: each rank's row, one word an op (stage, kind, micro-batch).")
    schedule = page.call(schedule_of, Layout(pp=p), MICROS)
    page.say(*(f"  {line[:150]}" for line in schedule.grid().splitlines()))
    if p > 1:
        rows = [list(row) for row in schedule.rows]
        rows[0][0], rows[0][1] = rows[0][1], rows[0][0]
        rows[1][0], rows[1][len(rows[1]) - 1] = rows[1][len(rows[1]) - 1], rows[1][0]
        try:
            check(replace(schedule, rows=tuple(map(tuple, rows))))
            refused = None
        except ValueError as error:
            refused = str(error).splitlines()[0]
        page.say("  With two ops of rank 1 changed about, it is refused before the first message:", f"  {refused}")
        page.check(refused is not None, "a schedule that cannot be is refused")

    page.say("", "3. Its time, on the virtual clock: the program above, where F, B and W of a rank's layers take 1 each, and messages",
             "   nothing; and the micro-batches that each rank has in flight, at most:",
             f"  {'schedule':<14}{'makespan':>9}{'simulated':>10}{'bubble':>8}{'formula':>8}   in flight")
    names = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2") if p > 1 else ("gpipe",)     # 1F1B of one rank is no pipeline
    bubbles = {}
    for name in names:
        layout = Layout(pp=p, schedule=name)
        made = page.call(schedule_of, layout, MICROS)
        stages = made.depth // p                            # of a rank: interleaved has two, and each takes and keeps half
        time = Fraction(1, stages)
        clock, line = ClockWorld(everywhere(Link()), given(dict.fromkeys("FBW", time))), simulate(made, Costs(time, time, time))
        page.call(clock.run, one_step, p, layout)
        formula = bubbles[name] = bubble(name, Sizes(p, MICROS, stages), 1, 1, 1)
        told = "-" if formula is None else f"{float(formula):g}"
        page.say(f"  {name:<14}{float(clock.makespan):>9g}{float(line.makespan):>10g}{float(line.bubble):>8g}{told:>8}   "
                 + " ".join(f"{bound / stages:g}" for bound in made.bound))
        page.check(clock.makespan == line.makespan and formula in (None, line.bubble),
                   f"{name}: the program, the simulation and the formula agree")
    if bubbles.get("interleaved") is not None:
        page.check(2 * bubbles["interleaved"] == bubbles["1f1b"], "interleaving helps: with two stages a rank, half of 1F1B's bubble")

    page.say("", "4. 32 rows on 4 stages.  A larger micro-batch SIZE makes the bubble larger, a larger NUMBER smaller:")
    for size in (1, 2, 4, 8):
        line = simulate(page.call(generate, "1f1b", 4, 32 // size), Costs(size, size, size))
        page.say(f"  {32 // size:>2} micro-batches of {size}   {float(line.bubble / line.makespan):>6.1%} of the time is bubble")

    page.say("", "5. Steps of training beside a single process, whatever the schedule: loss, gradients, norm, weights, moments.")
    short = replace(PROOF, rows=5, sequence=9, micro_batches=3)
    for name in ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-v") + (("dualpipe",) if p % 2 == 0 else ()):
        page.prove(properties.sharded_equals_single, Situation(MODEL, Layout(pp=p, schedule=name), short, 0, (5, 16), (0.0, 0.4)), name)
    if page.fault:
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.")
    page.judge("6.", [properties_pp.pipeline_equals_one_place, properties_pp.in_flight_is_the_formula],
               [Situation(MODEL, Layout(pp=ranks), replace(short, steps=1, micro_batches=count), 0, (5, 16))
                for ranks in (2, 3, 4) for count in (1, 3, 5)])


if __name__ == "__main__":
    lesson.main(teach, mine=one_f_one_b, gives=lambda s: {"rows": ((Op("F", 0, 0), ...),) * s.p}, faults=faults_pp.PIPELINES[:3])
