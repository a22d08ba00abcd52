"""Lesson 01: collectives from nothing.

What:  Each rank counts the words of its part of a text by their length: 10 numbers.  All ranks want the sums over the whole text.
       That is an all_reduce.  First over one rank, which then has all the work; then around a ring, where everybody has the same.
Why:   Every kind of parallelism ends in a handful of such operations, and what they move decides how fast it is.  Here each
       is made of send and recv alone; its messages and bytes are counted, and compared with the formula and the survey's table 2.

Run:   python lessons/01_collectives_from_nothing.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/01_collectives_from_nothing.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages, one line each
       ... --mine FILE         judge your own ring all_reduce(x, axis): the sum of every rank's x, of any shape, on all ranks.
                               Use axis.index, axis.size, axis.isend(array, to), axis.irecv(out, source), and .wait() on what
                               these return.  x is not yours to write.  Send no byte too many.
"""
from pathlib import Path

import numpy as np

from refpar import lesson
from refpar.algorithms.gather import gather
from refpar.comm import collectives, ring, trees
from refpar.comm.mesh import Axis
from refpar.comm.shards import slices
from refpar.config import Layout, share, shares
from refpar.oracle import properties_comm
from refpar.oracle.situation_comm import CommSituation
from refpar.plan import volume

WORDS = Path(__file__).with_name("text.txt").read_text().split()
LENGTHS = 10                                # words of 1, 2, ... 9 letters, and of 10 or more


def lengths_of(axis):
    """How many words of each length stand in this rank's part of the text: int64 [10]."""
    mine = WORDS[share(len(WORDS), axis.size, axis.index)]
    return np.bincount([min(len(word), LENGTHS) - 1 for word in mine], minlength=LENGTHS)


def all_reduce_over_root(x, axis):
    """The plain way: rank 0 receives everything, adds, and sends the sum to each of the others."""
    if axis.index > 0:
        axis.send(x, 0)
        total = np.empty_like(x)
        axis.recv(total, 0)
        return total
    total, arriving = x.copy(), np.empty_like(x)
    for source in range(1, axis.size):
        axis.recv(arriving, source)
        total += arriving
    for to in range(1, axis.size):
        axis.send(total, to)
    return total


def over_root(wire):
    axis = Axis.world(wire)
    x = lengths_of(axis)
    return x, all_reduce_over_root(x, axis)


def first_half(wire):
    axis = Axis.world(wire)
    return collectives.reduce_scatter(lengths_of(axis), axis, algorithm="ring")


def second_half(wire, finished):
    axis = Axis.world(wire)
    return collectives.all_gather(finished[axis.index], axis, 0, shares(LENGTHS, axis.size), algorithm="ring")


def both_halves(wire):
    axis = Axis.world(wire)
    return ring.all_reduce(lengths_of(axis), axis)


def every_operation(wire):
    """Each operation of table 2 on an array of T elements that divides evenly; its values do not matter."""
    axis = Axis.world(wire)
    block, n = np.zeros((60, 1)), axis.size
    whole, shard, square = np.tile(block, (n * n, 1)), np.tile(block, (n, 1)), np.tile(block, (1, n))       # T, T/N, T/N elements
    trees.reduce(whole, axis)
    gather(shard, axis, 0, [60 * n] * n)
    collectives.all_gather(shard, axis, 0, [60 * n] * n, algorithm="ring")
    collectives.reduce_scatter(whole, axis, algorithm="ring")
    collectives.all_to_all(square, axis, 1, [1] * n, 0, [60] * n)
    ring.all_reduce(whole, axis)


def teach(page: lesson.Page):
    p, truth = page.ranks, np.bincount([min(len(word), LENGTHS) - 1 for word in WORDS], minlength=LENGTHS)
    parts = slices(shares(LENGTHS, p))
    page.say("1. What every rank holds: its words by length, and the parts into which the ring will cut these numbers.")
    told = page.run(over_root)
    held = [x for (x, _), _ in told]
    name = lesson.recogniser(held, parts)
    page.say("  letters   " + "".join(f"{length:>6}" for length in [*range(1, LENGTHS), "10+"]))
    page.say("  part      " + "".join(f"{j:>6}" for j, part in enumerate(parts) for _ in range(part.stop - part.start)))
    for rank, x in enumerate(held):
        page.say(f"  rank {rank:<5}" + row(x))

    page.say("", "2. Over one rank: all send to rank 0, and it sends the sum back to each.")
    page.say(f"  messages (bytes) sent by each rank: {lesson.in_a_row([diary.sent() for _, diary in told])}")
    page.show(told, name)
    page.check(all(np.array_equal(total, truth) for (_, total), _ in told), "every rank has the sum over the whole text")
    page.check(lesson.rounds_of(told) == 2 * (p - 1), f"2(p-1) rounds, of {truth.nbytes} bytes each: {lesson.rounds_of(told)}")

    page.say("", "3. Around the ring, first half (reduce_scatter): the sum of each part travels once around, and grows.")
    told = page.run(first_half)
    page.show(told, name)
    finished = [x for x, _ in told]
    for rank, x in enumerate(finished):
        page.say(f"  rank {rank:<5}" + " " * 6 * parts[rank].start + row(x))
    page.check(all(np.array_equal(x, truth[part]) for x, part in zip(finished, parts)), "rank i holds part i of the sum, finished")
    page.compare(told, formula("reduce_scatter", p))

    page.say("", "4. Around the ring, second half (all_gather): the finished parts travel once around.")
    told = page.run(second_half, finished)
    page.show(told, name)
    page.check(all(np.array_equal(x, truth) for x, _ in told), "every rank has all parts")
    page.compare(told, formula("all_gather", p))

    page.say("", "5. Both halves are all_reduce: as many rounds as over one rank, and in each only one part of the array.")
    told = page.run(both_halves)
    if page.mine:
        page.show(told, name)
    for rank, (total, _) in enumerate(told):
        page.say(f"  rank {rank:<5}" + row(total))
    page.check(all(np.array_equal(total, truth) for total, _ in told), "every rank has the sum over the whole text")
    page.compare(told, formula("all_reduce", p))
    sent, least = sum(diary.sent()[1] for _, diary in told), 8 * volume.lower_bound("all_reduce", shares(LENGTHS, p))
    page.check(sent == least, f"all ranks together send {sent} bytes, and no algorithm can do with less than {least}")
    longest = max((step.array.nbytes for step in lesson.steps_of(told)), default=0)
    page.check(lesson.rounds_of(told) == 2 * (p - 1), f"2(p-1) rounds, of at most {longest} bytes each: {lesson.rounds_of(told)}")
    table_2(page)
    page.judge("7.", [properties_comm.collective_means, properties_comm.bitwise_repeatable, properties_comm.collective_counts],
               situations())


def table_2(page: lesson.Page):
    """The survey's formulas, read as it says (T is what a rank has before the operation), beside what was counted."""
    n, total = page.ranks, 60 * page.ranks**2
    page.say("", f"6. The survey's table 2, for N = {n} and an array of T = {total} elements.  The survey says that its T is what",
             "one rank has before the operation; refpar's T is the whole array.  Elements received by the root, or sent by each:",
             f"  {'':<16}{'survey':<14}{'with its T':>10}{'counted':>10}   refpar")
    told = page.run(every_operation)
    for operation, line in volume.SURVEY.items():
        before = total // n if operation in ("gather", "all_gather", "all_to_all") else total
        printed = {"(N-1) T": n - 1, "(N-1) T/N": (n - 1) / n, "2 (N-1) T/N": 2 * (n - 1) / n}[line.printed] * before
        way = "recv" if line.counts.startswith("received") else "send"
        counted = told[0].diary.bytes[way, "world", operation] // 8
        page.say(f"  {operation:<16}{line.printed:<14}{printed:>10g}{counted:>10}   {line.ours}")
        if counted != printed and line.note != "none":
            page.say(f"  {'':<16}differs: {line.note}")
        page.check(counted == line.value(n, total), f"{operation}: counted as refpar's formula says")


def formula(operation: str, p: int) -> list[tuple[int, int]]:
    """Messages and bytes that each of p ranks sends, of 10 numbers of 8 bytes."""
    volumes = [volume.FORMULAS[operation](rank, shares(LENGTHS, p)) for rank in range(p)]
    return [(messages, 8 * elements) for messages, elements, *_ in volumes]


def row(x) -> str:
    return "".join(f"{n:>6}" for n in x.tolist())


def situations() -> list[CommSituation]:
    """Where your all_reduce is judged: 1 to 5 ranks; arrays that cut evenly, unevenly, and not at all."""
    arrays = ((4, 15), "int64"), ((7, 3), "float64"), ((0, 3), "float64")
    return [CommSituation(Layout(dp=p), ("dp",), (rows, columns), 0, tuple(shares(rows, p)), 1, tuple(shares(columns, p)), dtype,
                          cases=("all_reduce ring",))
            for p in (1, 2, 3, 5) for (rows, columns), dtype in arrays]


if __name__ == "__main__":
    lesson.main(teach, mine=ring.all_reduce, gives=lambda x, *_, **__: x)
