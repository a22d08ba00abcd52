"""Lesson 12: all axes on one page.

What:  Data, pipeline, context and tensor parallelism at once: 16 ranks, two on each axis, with sequence parallelism.  Who stands
       where, who talks to whom about what, and what each rank holds; and it is still the single process, to rounding.
Why:   Real runs use all of them.  Nothing new is needed: an axis is a group of ranks, a parameter's gradient is summed over the axes
       on which its activations are cut, less those of its own cuts, and everything else is an addition.

Run:   python lessons/12_all_axes.py                              16 ranks are threads of one process
       mpiexec -n 16 python -m mpi4py lessons/12_all_axes.py      16 processes; with fewer, the axes that fit
       ... --show              step through the messages of a step
       ... --mine FILE         judge your own summed_axes(dims, inside, sequence_parallel=False): the axes, such as ("dp", "cp"), over which
                               the gradient of a parameter of these dims, such as "D HE/tp", is summed.  inside: of the seams
       ... --fault NAME        plant a real mistake, such as norm-counts-copies: the lesson ends red
"""
from dataclasses import replace

from refpar import lesson
from refpar.comm.mesh import groups, rank_at
from refpar.config import PRESETS, Layout
from refpar.oracle import faults_pp, properties
from refpar.oracle.judge import weigh
from refpar.oracle.run import run_sharded
from refpar.oracle.situation import PROOF, Situation
from refpar.parallel.placement import gradient_sums, summed_axes
from refpar.plan import traffic
from refpar.schedules.model import part_of_model

MODEL = PRESETS["hybrid-uneven"]
WHY = {"tp": "addends of a layer, and slices of tokens", "cp": "keys, states, tails of a conv", "pp": "hidden states and their gradients",
       "dp": "nothing in forward"}


def layout_of(ranks: int) -> Layout:
    """As many axes of two as fit the ranks, the innermost first."""
    sizes = {}
    for axis in ("tp", "cp", "pp", "dp"):
        sizes[axis], ranks = (2, ranks // 2) if ranks % 2 == 0 else (1, ranks)
    sizes["dp"] *= ranks
    return Layout(**sizes, sp=True, cp_attention="zigzag", cp_mamba="chain")


def teach(page: lesson.Page):
    layout = layout_of(page.ranks)
    page.say(f"1. The map of {lesson.count(page.ranks, 'rank')}, {layout}: dp outermost, tp innermost.  A line is a stage of a replica;",
             "  | parts its cp, and side by side stand its tp:")
    for dp in range(layout.dp):
        for pp in range(layout.pp):
            rows = ("  ".join(f"{rank_at(layout, dict(dp=dp, pp=pp, cp=cp, tp=tp)):>2}" for tp in range(layout.tp))
                    for cp in range(layout.cp))
            page.say(f"  replica {dp}, stage {pp}:   " + "   |   ".join(rows))

    page.say("", "2. Who talks to whom.  The groups of each axis, and what about:")
    for axis in ("tp", "cp", "pp", "dp"):
        found = groups(layout, axis)
        page.say(f"  {axis}   {WHY[axis]:<42} " + " ".join(map(str, found[:4])) + " ..." * (len(found) > 4))

    page.say("", "3. Over whom a gradient is summed, with sequence parallelism, on the first stage: of what is cut, and of others:")
    chain = part_of_model(MODEL, traffic.mesh_of(layout, 0), PROOF)[0]
    sums = page.call(gradient_sums, chain, layout)
    for layer, name in list(sums):
        if name in ("x", "A_log", "norm", "q", "k", "table"):
            over = sums[layer, name]
            page.say(f"  {layer + '.' + name:<20} {chain.dims()[layer][name]:<12} {' + '.join(over.axes)}"
                     + (f", and the run of tp that shares one of {over.units}" if over.units else ""))

    page.say("", "4. Two steps of a hybrid of attention, Mamba-1 and Mamba-2, tokens led from zig-zag to runs around each scan:")
    situation = Situation(MODEL, layout, replace(PROOF, rows=6, sequence=13, micro_batches=2), 0, (5, 16), (0.0, 0.4))
    told = page.run(run_sharded, situation)
    judgement = weigh(situation, [one for one, _ in told])
    books = judgement.books
    page.check(judgement.wrong is None, "loss, gradients, norm, weights, moments are those of a single process, replicas alike to the bit"
               + (f": {judgement.wrong}" if judgement.wrong else ""))
    page.check(books.wrong is None, "every rank held, sent and computed what the formulas say")
    for axis, (counted, formula) in books.sent.items():
        page.say(f"  {axis:<12} {counted:>12,} bytes sent = {formula:,}")
    for kind, (share, _) in books.held.items():
        page.say(f"  {kind:<12} at most {share:.1%} of the single process's on any rank")
    page.show(told, lambda array: f"{array.size} numbers")

    page.say("", "5. Any mix of them: other models, schedules and ways, on the same ranks.")
    short = replace(PROOF, rows=5, sequence=9, micro_batches=3)
    for name, changes in (("llama-uneven", dict(cp_attention="ulysses", schedule="zb-h2")), ("gpt2-uneven", dict(tp_ring=True)),
                          ("mamba1-uneven", dict(cp_mamba="scan", recompute="full")), ("mamba2-uneven", dict(cp_mamba="heads"))):
        page.prove(properties.sharded_equals_single,
                   Situation(replace(PRESETS[name], blocks=1), replace(layout, **changes), short, 0, (5, 16), (0.0, 0.4)),
                   f"{name}: {' '.join(f'{key} {value}' for key, value in changes.items())}")
    if page.fault:
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.")
    page.judge("6.", [properties.sharded_equals_single],
               [Situation(PRESETS["hybrid-uneven"], each, replace(short, rows=3), 0, (5, 16))
                for each in (Layout(dp=2), Layout(cp=2), Layout(tp=2), Layout(tp=2, sp=True), Layout(dp=2, tp=2, sp=True))])


if __name__ == "__main__":
    lesson.main(teach, mine=summed_axes, gives=lambda *_: ("dp", ...), faults=faults_pp.PIPELINES, ranks=16)
