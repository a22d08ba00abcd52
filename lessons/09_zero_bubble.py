"""Lesson 09: zero bubble.

What:  Backward is two halves.  B gives the gradient of a stage's input, and the stage before waits for it; W multiplies out the
       weights' gradients, and nobody waits.  So W is moved to where a rank would have nothing to do.
Why:   The bubble of a pipeline is the waiting at its start and end.  With the halves apart much of it is filled, for no more memory
       than 1F1B (ZB-H1), or nearly all, for twice as much (ZB-H2); folded into a V (ZB-V) for no more at all, if the times are alike.

Run:   python lessons/09_zero_bubble.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/09_zero_bubble.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages of one step
       ... --mine FILE         judge your own zb_h1(s): as lesson 08's one_f_one_b, with Op("B", rank, micro) and Op("W", rank, micro)
       ... --fault NAME        plant a real mistake, such as put-off-and-not-scaled: the lesson ends red
"""
from dataclasses import replace

import numpy as np

from refpar import lesson, watch
from refpar.config import PRESETS, Layout
from refpar.nn.build import build
from refpar.nn.chain import backward, forward, start
from refpar.nn.gradient import loss_and_gradients, zeros_like
from refpar.nn.init import initial
from refpar.nn.product import settle
from refpar.oracle import equal, faults_pp, properties, properties_pp
from refpar.oracle.books import spot_of, steps_of
from refpar.oracle.packed import packed
from refpar.oracle.run import run_sharded
from refpar.oracle.situation import PROOF, Situation
from refpar.parallel.schedule import Op
from refpar.plan.bubble import Sizes, bubble
from refpar.plan.passes import stores
from refpar.schedules.generate import zb_h1
from refpar.schedules.model import schedule_of
from refpar.schedules.simulate import Costs, simulate
from refpar.show.schedule import chart

MODEL = replace(PRESETS["hybrid-uneven"], blocks=1)
MICROS = 8
NAMES = ("1f1b", "zb-h1", "zb-h2", "zb-v")


def halves():
    """B and W of one batch: FLOPs of each, and the gradients."""
    batch, chain = packed([0], 3, 9, MODEL.vocab, (5, 16)), build(MODEL)
    params = initial(MODEL, chain, 0, np.float64, rough=True)
    logits, after, saved = forward(chain, batch.tokens, params, batch, start(chain, params, batch))
    _, kept = chain.loss.forward(logits, batch.targets)
    with watch.watching(watch.Ledger()) as first:
        _, _, products = backward(chain, chain.loss.backward(1.0 / batch.count, kept), saved, params, batch, zeros_like(after))
    with watch.watching(watch.Ledger()) as second:
        grads = settle(products)
    _, whole = loss_and_gradients(chain, params, batch, batch.count)
    return sum(first.flops.values()), sum(second.flops.values()), equal.compare(grads, whole, 27 * MODEL.vocab)


def kept(layout: Layout):
    """[for W, in all] of each rank, at most: elements that it keeps between F and W, of a model of four blocks, by the formula that is
    counted beside every run."""
    situation = Situation(replace(MODEL, blocks=4), layout, replace(PROOF, rows=MICROS, sequence=16, micro_batches=MICROS))
    found = []
    for rank in range(layout.ranks):
        spots = [spot_of(situation, rank, piece) for piece in steps_of(situation, rank)[0]]
        found.append([(store.left, store.saved + store.left) for store in stores(situation.model, layout, MICROS, rank, spots)])
    return [[max(sizes) for sizes in zip(*row)] for row in found]


def teach(page: lesson.Page):
    p = page.ranks
    b, w, apart = halves()
    page.say("1. Backward of a hybrid of attention and Mamba, in two halves.  What is saved for W is x and dy of each linear map.",
             f"  B, to the inputs: {b:,} floating-point operations    W, the weights': {w:,}")
    page.check(all(error <= 1 for error in apart.values()), "together they are the backward of one piece")

    page.say("", f"2. {MICROS} micro-batches on {lesson.count(p, 'rank')}, F, B and W alike long.  A dot begins a wait.")
    for name in NAMES:
        line = simulate(page.call(schedule_of, Layout(pp=p, schedule=name), MICROS), Costs())
        page.say(f"  {name}: makespan {line.makespan}, bubble {line.bubble}, in flight at most {max(line.schedule.bound)}",
                 *(f"    {row if len(row) < 145 else row[:145].rsplit(' ', 1)[0] + ' ...'}" for row in chart(line)))
    lines = [simulate(page.call(schedule_of, Layout(pp=p, schedule=name), MICROS), Costs()) for name in NAMES[:3]]
    page.check(lines[0].bubble >= lines[1].bubble >= lines[2].bubble, "each has a smaller bubble than the one before, or as small")
    page.check(lines[1].bubble == bubble("zb-h1", Sizes(p, MICROS), 1, 1, 1), "ZB-H1's is that of the formula")

    page.say("", "3. Where B takes longer than W, as here by the counted operations, less fits into the bubble:")
    for name in NAMES:
        line = simulate(page.call(schedule_of, Layout(pp=p, schedule=name), MICROS), Costs(w, b, w))
        page.say(f"  {name:<7} {float(line.bubble / line.makespan):>6.1%} of the time is bubble")

    page.say("", "4. What each rank keeps at most, in thousands of numbers, rank by rank: from B to W; and in all, from F to W.")
    most = {name: page.call(kept, Layout(pp=p, schedule=name)) for name in NAMES}
    for name, ranks in most.items():
        for_w, in_all = ("".join(f"{size / 1000:>7.1f}" for size in sizes) for sizes in zip(*ranks))
        page.say(f"  {name:<7} for W {for_w}    in all {in_all}")
    page.check(all(most[name][r][0] == min(MICROS, step * r + 1) * most["1f1b"][r][0]
                   for step, name in enumerate(NAMES[:3]) for r in range(p)),
               "1F1B keeps one micro-batch's operands for W; rank r of ZB-H1 those of r+1, and of ZB-H2 of 2r+1")

    page.say("", "5. The same gradients, and as much is kept: W later is W all the same.  Beside a single process, on the same batches:")
    short = replace(PROOF, rows=5, sequence=9, micro_batches=3)
    for name in NAMES:
        page.prove(properties.sharded_equals_single, Situation(MODEL, Layout(pp=p, schedule=name), short, 0, (5, 16), (0.0, 0.4)), name)
    told = page.run(run_sharded, Situation(MODEL, Layout(pp=p, schedule="zb-h1"), replace(short, steps=1), 0, (5, 16)))
    page.show(told, lambda array: f"{array.size} numbers")
    if page.fault:
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.")
    page.judge("6.", [properties_pp.pipeline_equals_one_place, properties_pp.in_flight_is_the_formula],
               [Situation(MODEL, Layout(pp=ranks, schedule="zb-h1"), replace(short, steps=1, micro_batches=count), 0, (5, 16))
                for ranks in (2, 3, 4) for count in (1, 3, 5)])


if __name__ == "__main__":
    lesson.main(teach, mine=zb_h1, gives=lambda s: {"rows": ((Op("F", 0, 0), ...),) * s.p}, faults=faults_pp.SCHEDULED[:2])
