"""Lesson 00: ranks and messages.

What:  A rank is a process or a thread with a number.  It holds what it holds, and knows of the others only what they send.
       Here each rank counts the words of its own part of a text; then all of them learn the sum.
Why:   Everything that follows, up to a model cut over thousands of processors, is made of two calls: send and receive.

Run:   python lessons/00_ranks_and_messages.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/00_ranks_and_messages.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages, one line each
       ... --mine FILE         judge your own broadcast(x, axis, root=0): the root's x, on all ranks.  Elsewhere x tells only shape
                               and dtype.  Use axis.index, axis.size, axis.send(array, to), axis.recv(out, source).
"""
from pathlib import Path

import numpy as np

from refpar import lesson
from refpar.comm import trees
from refpar.comm.mesh import Axis
from refpar.comm.threads import ThreadWorld
from refpar.config import Layout, share, shares
from refpar.oracle import properties_comm
from refpar.oracle.situation_comm import CommSituation
from refpar.plan import volume
from refpar.sanitizer.endings import Deadlock

WORDS = Path(__file__).with_name("text.txt").read_text().split()


def words_of(axis) -> list[str]:
    """This rank's share of the words, as even as can be.  Every rank can work it out from its number: nothing is sent."""
    return WORDS[share(len(WORDS), axis.size, axis.index)]


def pass_along(x, axis):
    """A running sum down the line: each rank receives from the left, adds its own, sends to the right.  The last has it all."""
    total = x.copy()
    if axis.index > 0:
        arriving = np.empty_like(x)
        axis.recv(arriving, axis.index - 1)
        total += arriving
    if axis.index + 1 < axis.size:
        axis.send(total, axis.index + 1)
    return total


def tell_each(x, axis, root: int = 0):
    """Broadcast, the plain way: the root sends to one rank after the other."""
    if axis.index == root:
        for to in range(axis.size):
            if to != root:
                axis.send(x, to)
        return x
    value = np.empty_like(x)
    axis.recv(value, root)
    return value


def count_words(wire):
    axis = Axis.world(wire)
    words = words_of(axis)
    return words, pass_along(np.array([len(words)]), axis)


def tell_by(wire, broadcast):
    """The last rank knows the sum; all others say only what kind of thing they expect."""
    axis = Axis.world(wire)
    last = axis.size - 1
    x = np.array([len(WORDS)]) if axis.index == last else np.empty(1, np.int64)
    return {"tell_each": tell_each, "broadcast": trees.broadcast}[broadcast](x, axis, last)


def both_wait(wire):
    """Two ranks that will send as soon as they have received."""
    axis, x = Axis.world(wire), np.zeros(1)
    axis.recv(x, 1 - axis.index)
    axis.send(x, 1 - axis.index)


def number(array) -> str:
    return f"the number {int(array[0])}"


def teach(page: lesson.Page):
    p = page.ranks
    page.say("1. What every rank holds.  The text is cut by a rule that all ranks know, so nobody needs to hand it out.")
    told = page.run(count_words)
    for rank, (words, _) in enumerate(held for held, _ in told):
        page.say(f"  rank {rank} of {p} holds {len(words):>3} words: {' '.join(words[:5])} ...")

    page.say("", "2. A running sum, passed along the line.")
    for rank, ((_, total), diary) in enumerate(told):
        messages, size = diary.sent()
        page.say(f"  rank {rank} has {int(total[0]):>4}, and sent {lesson.count(messages, 'message')}, {size} bytes")
    page.show(told, number)
    sent = sum(diary.sent()[0] for _, diary in told)
    page.check(int(told[p - 1].result[1][0]) == len(WORDS), f"the last rank has the sum: {len(WORDS)} words")
    page.check(sent == p - 1, f"p-1 messages for p = {p} ranks: {sent}")
    page.check(lesson.rounds_of(told) == p - 1, f"p-1 rounds, for each rank waits for the one before: {lesson.rounds_of(told)}")

    page.say("", "3. The last rank tells the others, in two ways.  Both send p-1 messages; they differ in the time.")
    for name, rounds, formula in (("tell_each", p - 1, "p-1"), ("broadcast", (p - 1).bit_length(), "log2 p, rounded up,")):
        told = page.run(tell_by, name)
        counted = [diary.sent() for _, diary in told]
        page.say(f"  {name}: the ranks sent {', '.join(str(messages) for messages, _ in counted)} messages, "
                 f"in {lesson.count(lesson.rounds_of(told), 'round')}")
        page.show(told, number)
        page.check(all(int(x[0]) == len(WORDS) for x, _ in told), f"{name}: every rank has the sum")
        page.check(sum(messages for messages, _ in counted) == p - 1, f"{name}: p-1 messages in all")
        if page.mine is None or name == "tell_each":
            page.check(lesson.rounds_of(told) == rounds, f"{name}: {formula} = {rounds} rounds")
    if page.mine is None:
        promised = [volume.broadcast(rank, shares(1, p), root=p - 1)[:2] for rank in range(p)]
        page.compare(told, [(messages, 8 * elements) for messages, elements in promised])

    page.say("", "4. What goes wrong first.  Two ranks that both receive before they send wait for ever.  Threads report it:")
    try:
        ThreadWorld().run(both_wait, 2)
        page.check(False, "a deadlock is reported")
    except Deadlock as report:
        page.say("  " + str(report))
        page.check(True, "a deadlock is reported, not waited for")
    page.judge("5.", [properties_comm.collective_means], situations())


def situations() -> list[CommSituation]:
    """Where your broadcast is judged: 1 to 5 ranks, the first or the last as root, arrays of two shapes, one of them empty."""
    return [CommSituation(Layout(dp=p), ("dp",), shape, 0, (shape[0],) + (0,) * (p - 1), 1, (shape[1],) + (0,) * (p - 1), root=root,
                          cases=("broadcast tree",))
            for p in (1, 2, 3, 5) for root in {0, p - 1} for shape in ((3, 2), (0, 4))]


if __name__ == "__main__":
    lesson.main(teach, mine=trees.broadcast, gives=lambda x, *_, **__: x)
