"""Lesson 03: data parallel.

What:  Every rank holds the whole model and some rows of the batch.  Each goes down and up the model with its own rows; then the
       gradients are summed over the ranks, and all take the same step.  A tiny llama is trained so, and equals a single process.
Why:   It is the simplest way to use many processors, and the place of the commonest mistake: a mean of means is not the mean.
       Rows have unequal numbers of targets here (some are masked), as they have in practice, so that the mistake can be seen.

Run:   python lessons/03_data_parallel.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/03_data_parallel.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages, one line each
       ... --fault NAME        plant a real mistake, such as local-count, and see which check finds it: the lesson ends red
       ... --mine FILE         judge your own reduce_gradients(grads, chain, mesh): grads is layer -> parameter -> array; return the
                               same names, each array summed over the ranks of mesh.axis("dp", "cp").  You may use
                               refpar.comm.collectives.all_reduce(x, axis).  What you are given is not yours to write.
"""
from dataclasses import replace
from pathlib import Path

import numpy as np

from refpar import corpus, lesson, reading
from refpar.comm.mesh import Mesh
from refpar.config import Layout, Model, Training
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients
from refpar.nn.init import initial
from refpar.oracle import equal, faults, properties
from refpar.oracle.situation import Situation
from refpar.parallel.data import accumulate, count_targets, reduce_gradients, sum_loss
from refpar.plan import promise
from refpar.train import State, rate_of, train_step

MODEL = Model(blocks=1, width=8, heads=2, kv_heads=1, head_width=4, ffn=12)
TRAINING = Training(steps=3, rows=7, sequence=24, micro_batches=2, optimizer="sgd", rate=0.1, warmup=0, decay=0.0, clip=0.0,
                    dtype="float64")
MASKED = (0, 20, 24, 12, 22, 2, 23)         # of each row the first so many targets do not count: all of row 2
ROWS = (7, 7, 5)                            # of steps 0, 1, 2: the last window is incomplete
TOKENS = 7 * 24                             # the longest sum behind a gradient has so many addends
TEXT = reading.load(Path(__file__).with_name("text.txt"), TRAINING.sequence)
NORM = "1.attention", "norm"                # a parameter small enough to print


def rows_of(step: int, rows: slice = slice(None)) -> corpus.Batch:
    """Some rows of the batch of a step, masked.  Any rank can work out any part of it, so no row is ever sent."""
    batch = corpus.batch(TEXT, replace(TRAINING, rows=ROWS[step]), step, rows)
    masked = np.array(MASKED[:ROWS[step]])[rows][:, None]                       # [B, 1]
    return batch._replace(targets=np.where(np.arange(TRAINING.sequence) < masked, -1, batch.targets))


def fresh():
    """The model, and the state before the first step: the same on every rank, for it follows from the seed."""
    chain = build(MODEL)
    params, zeros, more_zeros = (initial(MODEL, chain, TRAINING.seed, np.float64, rough=True) for _ in range(3))
    return chain, State(params, zeros, more_zeros)                              # sgd keeps no moments, and reads none


def my_batches(mesh, step: int) -> list:
    """This rank's rows of a step, in micro-batches: unequal, or empty."""
    dp = mesh.axis("dp")
    return [rows_of(step, part) for part in corpus.micro_batches(ROWS[step], dp.size, dp.index, TRAINING.micro_batches)]


def one_step_opened(wire):
    """What `train_step` does, up to the gradients, and all that is seen on the way."""
    mesh = Mesh(Layout(dp=wire.size), wire)
    chain, state = fresh()
    batches = my_batches(mesh, 0)
    count = count_targets(batches, mesh)
    loss, mine = accumulate(chain, state.params, batches, count)
    summed = reduce_gradients(mine, chain, mesh)
    return {"rows": [len(batch.tokens) for batch in batches], "targets": sum(int((batch.targets >= 0).sum()) for batch in batches),
            "count": count, "loss": float(loss), "total": sum_loss(loss, mesh), "before": mine[NORM[0]][NORM[1]], "grads": summed}


def training(wire):
    """Three steps: the loss of each, and the weights at the end."""
    mesh = Mesh(Layout(dp=wire.size), wire)
    chain, state = fresh()
    losses = []
    for step in range(TRAINING.steps):
        state, report = train_step(chain, state, my_batches(mesh, step), mesh, TRAINING)
        losses.append(report.loss)
    return losses, state.params


def alone():
    """The meaning: one process, all rows in one batch.  Losses, first gradients, and weights after three steps."""
    chain, state = fresh()
    losses, first = [], None
    for step in range(TRAINING.steps):
        batch = rows_of(step)
        count = int((batch.targets >= 0).sum())
        loss, grads = loss_and_gradients(chain, state.params, batch, count)
        first = first or grads
        losses.append(float(loss) / count)
        rate = rate_of(step, TRAINING)
        state = state._replace(params={layer: {name: w - rate * grads[layer][name] for name, w in group.items()}
                                       for layer, group in state.params.items()})
    return losses, first, state.params


def teach(page: lesson.Page):
    losses, gradients, weights = alone()
    one_step(page, losses[0], gradients)
    three_steps(page, losses, weights)
    if page.fault:
        seen = "" if page.failed else f"  It was not seen: on {lesson.count(page.ranks, 'rank')} it hides."
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.{seen}")
    page.judge("7.", [properties.sharded_equals_single], situations())


def one_step(page: lesson.Page, loss_alone: float, gradients: dict):
    p = page.ranks
    told = page.run(one_step_opened)
    held = [one for one, _ in told]
    numbers = sum(array.size for _, array in equal.leaves(gradients))
    page.say(f"1. What every rank holds: the whole model, {numbers} numbers, and its rows of the batch, in two micro-batches.")
    for rank, one in enumerate(held):
        page.say(f"  rank {rank}   rows {' + '.join(map(str, one['rows']))}   targets {one['targets']:>3}")

    targets = sum(one["targets"] for one in held)
    page.say("", "2. How many targets are there?  Each rank counts its own, and an all_reduce adds them, before any backward.")
    page.say(f"  the ranks now say {', '.join(str(one['count']) for one in held)}")
    page.check(all(one["count"] == targets for one in held), f"the count is of all ranks together: {targets}")

    page.say("", "3. The loss is a sum, divided once, by that count.  The mean of the ranks' own means is another number:")
    for rank, one in enumerate(held):
        own = f"{one['loss'] / one['targets']:#.6g}" if one["targets"] else "none"
        page.say(f"  rank {rank}   sum {one['loss']:#.6g}   own mean {own}")
    means = [one["loss"] / one["targets"] for one in held if one["targets"]]
    loss = held[0]["total"] / targets
    page.say(f"  sum of sums / count = {loss:#.6g}; mean of the means = {sum(means) / len(means):#.6g}")
    page.check(equal.distance(loss, loss_alone, TOKENS) <= 1, f"the loss is that of a single process: {loss_alone:#.6g}")

    page.say("", f"4. Gradients.  Each rank has an addend; here the first 4 of the {MODEL.width} numbers of {'.'.join(NORM)}:")
    for rank, one in enumerate(held):
        page.say(f"  rank {rank}   before {numbers_of(one['before'])}")
    page.say(f"  all      after  {numbers_of(held[0]['grads'][NORM[0]][NORM[1]])}")
    page.check(all(same(one["grads"], held[0]["grads"]) for one in held), "after the all_reduce all ranks have the same bits")
    far = [name for name, apart in equal.compare(held[0]["grads"], gradients, TOKENS).items() if not apart <= 1]
    page.check(not far, "every gradient is that of a single process, within the rounding of its sum"
               + (f": not {far[0]}, nor {len(far) - 1} others" if far else ""))

    page.say("", "5. What it cost: the count, the gradients in one bucket, and the loss; each an all_reduce, and nothing else.")
    if page.mine is None:
        one, bucket = ([promise.all_reduce_sends(rank, size, p, np.float64) for rank in range(p)] for size in (1, numbers))
        page.compare(told, [(2 * small[0] + large[0], 2 * small[1] + large[1]) for small, large in zip(one, bucket)])
    sent, least = sum(diary.sent()[1] for _, diary in told), 2 * (p - 1) * (numbers + 2) * 8
    page.check(sent >= least, f"all ranks together send {sent} bytes; 2(p-1) times the bytes of an array is the least: {least}")
    page.show(told, name_of)


def three_steps(page: lesson.Page, losses: list[float], weights: dict):
    page.say("", f"6. Training for {TRAINING.steps} steps; the last one has {ROWS[2]} rows in place of {ROWS[0]}.")
    trained = [one for one, _ in page.run(training)]
    for step in range(TRAINING.steps):
        page.say(f"  step {step}   loss on {lesson.count(page.ranks, 'rank')} {trained[0][0][step]:#.6g}   "
                 f"alone {losses[step]:#.6g}")
    page.check(all(same(params, trained[0][1]) for _, params in trained), "all replicas have the same bits")
    far = [name for name, apart in equal.compare(trained[0][1], weights, TOKENS).items() if not apart <= 1]
    page.check(not far, "the weights are those of a single process, within rounding" + (f": not {far[0]}" if far else ""))


def numbers_of(array) -> str:
    return "  ".join(f"{x:>#12.6g}" for x in array[:4])


def name_of(array) -> str:
    """What a message of a step is a part of: the count is a whole number, the loss a single one."""
    if array.dtype == np.int64:
        return f"count of targets, {lesson.count(array.size, 'number')}"
    return f"{'gradients' if array.size > 1 else 'loss'}, {lesson.count(array.size, 'number')}"


def same(a: dict, b: dict) -> bool:
    return all(x.tobytes() == y.tobytes() for (_, x), (_, y) in zip(equal.leaves(a), equal.leaves(b)))


def situations() -> list[Situation]:
    """Where your reduce_gradients is judged: 1 to 4 ranks, unequal rows and targets, the last window incomplete."""
    small = replace(TRAINING, steps=2, rows=5, sequence=8)
    return [Situation(MODEL, Layout(dp=p), small, 3, (5, 8), (0.0, 0.7, 1.0)) for p in range(1, 5)]


if __name__ == "__main__":
    lesson.main(teach, mine=reduce_gradients, gives=lambda grads, *_, **__: grads, faults=faults.NORMALISATION)
