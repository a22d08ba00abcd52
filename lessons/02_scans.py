"""Lesson 02, second part: scans.

What:  A scan keeps a state that decays and takes in each token: h[t] = a[t] h[t-1] + b[t].  Forward the state travels from the
       first token to the last; backward its gradient travels from the last to the first, through the same decays.  Each rank has
       a part of a text here, and both cross the ranks as one number a message.  Then other forms, one of which overflows.
Why:   The scan is what Mamba has in the place of attention.  What crosses the ranks does not grow with the text.

Run:   python lessons/02_scans.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/02_scans.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages, one line each
       ... --mine FILE         judge your own recurrence_backward(dh, a, h, before, dafter): dh [T] is the gradient of each state
                               as its readers see it, a [T] the decays, h [T] the states, before the state before the first,
                               dafter the gradient of the last as those see it who come after.  Return da [T], db [T], dbefore.
                               What you are given is not yours to write; T may be 0.
"""
from pathlib import Path

import numpy as np

from refpar import lesson
from refpar.comm.mesh import Axis
from refpar.config import Layout, Model, share
from refpar.nn.keyed import key, normal
from refpar.oracle import scans
from refpar.oracle import equal
from refpar.oracle.situation import Situation

PARAGRAPHS = [text.split() for text in Path(__file__).with_name("text.txt").read_text().split("\n\n")]
LENGTHS = np.array([len(word) for words in PARAGRAPHS for word in words], float)        # b: of each word its letters
DECAYS = np.concatenate([[0.0] + [0.5] * (len(words) - 1) for words in PARAGRAPHS])     # a: 0 where a paragraph begins
READ = np.ones(len(LENGTHS))                                                            # dh: each state is read, with weight 1
FORMS = scans.FORMS | {"quotient": scans.quotient}                                      # the first is what all others should be
STEP, ALLOWED = 1e-5, 1e-7                  # of the finite difference, and how far it may be away


def recurrence(a, b, before: float = 0.0):
    """h[t] = a[t] h[t-1] + b[t], token by token, from the state before the first."""
    h = np.empty_like(b)
    for t in range(len(b)):
        h[t] = before = a[t] * before + b[t]
    return h


def recurrence_backward(dh, a, h, before: float = 0.0, dafter: float = 0.0):
    """dh: what those who read h[t] say of it; dafter: what those say who come after -> da, db, dbefore."""
    da, db, later = np.empty_like(a), np.empty_like(dh), dafter
    for t in reversed(range(len(dh))):
        db[t] = dh[t] + later                                                   # of h[t] in all: from its readers, and from h[t+1]
        da[t] = db[t] * (h[t - 1] if t else before)
        later = a[t] * db[t]
    return da, db, later


def part_of(axis):
    """Which tokens are this rank's."""
    return share(len(LENGTHS), axis.size, axis.index)


def across_ranks(wire):
    """The state comes from the left and goes on to the right; then its gradient comes from the right and goes on to the left."""
    axis = Axis.world(wire)
    a, b, dh = (array[part_of(axis)] for array in (DECAYS, LENGTHS, READ))
    before, dafter = np.zeros(1), np.zeros(1)
    if axis.index > 0:
        axis.recv(before, axis.index - 1)
    h = recurrence(a, b, before[0])
    if axis.index + 1 < axis.size:
        axis.send(np.append(before, h)[len(h):], axis.index + 1)
        axis.recv(dafter, axis.index + 1)
    da, db, dbefore = recurrence_backward(dh, a, h, before[0], dafter[0])
    if axis.index > 0:
        axis.send(np.array([dbefore]), axis.index - 1)
    return {"h": h, "da": da, "db": db}


def small(wire):
    """Two documents of four tokens, read at the end; and the judge, along a direction of this rank's own."""
    a, last = np.array([0, 1, 1, 1] * 2) / 2, np.eye(8)[7]
    h = recurrence(a, np.ones(8))
    _, db, _ = recurrence_backward(last, a, h)
    turned = recurrence(np.append(0.0, a[:0:-1]), last[::-1])[::-1]             # a[t+1] stands between h[t] and h[t+1]
    return {"decay": a, "state": h, "gradient": db}, np.array_equal(db, turned), *judge(8, wire.rank)


def judge(tokens: int, who: int):
    """Along a drawn direction of decays, inputs and the state before: what backward says, what (f(x+hv) - f(x-hv)) / 2h says,
    whether they agree, and whether backward left alone what it was given."""
    def drawn(name, size):
        return normal(key(0, "scans", name), np.arange(size))
    names, sizes = ("a", "b", "before"), (tokens, tokens, 1)
    x, v = ([drawn(f"{kind} {name}", size) for name, size in zip(names, sizes)] for kind in ("at", f"direction {who}"))
    dh, dafter = drawn("dh", tokens), drawn("dafter", 1)[0]

    def f(h):
        a, b, before = (array + h * direction for array, direction in zip(x, v))
        states = recurrence(a, b, before[0])
        return float(dh @ states + dafter * np.append(before, states)[tokens])
    states = recurrence(x[0], x[1], x[2][0])
    given = [array.copy() for array in (dh, x[0], states)]
    g = recurrence_backward(dh, x[0], states, x[2][0], dafter)
    products = np.concatenate([np.atleast_1d(mine) * direction for mine, direction in zip(g, v)])
    said, measured = float(products.sum()), (f(STEP) - f(-STEP)) / (2 * STEP)
    agree = abs(said - measured) <= ALLOWED * float(np.abs(products).sum())
    return said, measured, agree, all(map(np.array_equal, given, (dh, x[0], states)))


def finite(k: int, dtype) -> list[int]:
    """With a decay of 2**-k: how many of 1024 tokens are right, by each form, before the first that is not."""
    a, b = np.full(1024, 2.0**-k, dtype), np.ones(1024, dtype)
    truth = scans.sequential(a, b, 0)
    limit = equal.bound(dtype, len(b), truth.max())
    right = [np.abs(form(a, b, 0) - truth) <= limit for form in FORMS.values()]     # what is not a number is not right
    return [int(np.argmin(np.append(tokens, False))) for tokens in right]


def teach(page: lesson.Page):
    p, words = page.ranks, len(LENGTHS)
    told = page.run(small)
    numbers, turned, said, measured, *_ = told[0].result
    page.say("1. h[t] = a[t] h[t-1] + b[t], with b = 1, on two documents of four tokens.  The decay is 0 where a document begins.",
             "   Only the last state is read.  Its gradient travels back from there, through the same decays, and stops at a 0:",
             *(f"  {name:<10}" + "".join(f"{n:>8g}" for n in x) for name, x in numbers.items()))
    page.check(turned, "the gradient is the recurrence itself, run from the other end, to the bit")
    page.say(f"  by hand <g, v> = {said:#.6g}   (f(x+hv) - f(x-hv)) / 2h = {measured:#.6g}")
    page.check(all(one[4] for one, _ in told), f"{lesson.count(p, 'judge')}, each with a direction of its own: da, db and dbefore")

    page.say("", f"2. Each rank has a part of the {words} words: b is a word's length, a is 0 where a paragraph begins, else 1/2.",
             "   The state crosses to the right, then its gradient to the left: one number each.")
    told = page.run(across_ranks)
    page.show(told, lambda array: f"{array[0]:#.6g}")
    h = recurrence(DECAYS, LENGTHS)
    alone = dict(zip(("da", "db"), recurrence_backward(READ, DECAYS, h))) | {"h": h}
    for rank, (mine, diary) in enumerate(told):
        messages, size = diary.sent()
        last = f"last state {mine['h'][len(mine['h']) - 1]:#.6g}" if len(mine["h"]) else "no words"
        page.say(f"  rank {rank}   {len(mine['h']):>3} words   {last}   sent {lesson.count(messages, 'message')}, {size} bytes")
    page.check(all(np.array_equal(np.concatenate([mine[name] for mine, _ in told]), whole) for name, whole in alone.items()),
               "states and gradients are those of one process, to the bit")
    sent = sum(diary.sent()[1] for _, diary in told)
    page.check(sent == 16 * (p - 1), f"2(p-1) messages of 8 bytes, whatever the text's length: {sent} bytes")
    other_forms(page)
    page.judge("4.", [recurrence_backward_is_the_derivative], [Situation(Model(), Layout(dp=p)) for p in range(1, 5)])


def other_forms(page: lesson.Page):
    table = {(k, dtype.__name__): finite(k, dtype) for k in (2, 4, 8) for dtype in (np.float32, np.float64)}
    page.say("", "3. Other forms of the same.  How many of 1024 tokens are right before the first that is not, with steady decays:",
             f"  {'decay':<8}{'':<10}" + "".join(f"{form:>12}" for form in FORMS))
    for (k, dtype), right in table.items():
        page.say(f"  1/{2**k:<6}{dtype:<10}" + "".join(f"{tokens:>12}" for tokens in right))
    page.check(all(tokens == 1024 for right in table.values() for tokens in right[:-1]), "all but quotient are right to the end")
    page.check(all(right[-1] == {"float32": 127, "float64": 1023}[dtype] // k for (k, dtype), right in table.items()),
               "quotient divides by the product of n decays of 2**-k: while kn is at most 127 in float32, 1023 in float64")


def recurrence_backward_is_the_derivative(world, situation):
    """A property, for --mine: on parts of several lengths, an empty one among them."""
    for tokens in (0, 1, 7):
        for said, measured, agree, kept in world.run(_judged, situation.layout.ranks, tokens):
            if not agree:
                raise AssertionError(f"{tokens} tokens: <g, v> is {said:.9g}, and differences say {measured:.9g}")
            if not kept:
                raise AssertionError("recurrence_backward has written into what it was given")


def _judged(wire, tokens: int):
    return judge(tokens, wire.rank)


if __name__ == "__main__":
    lesson.main(teach, mine=recurrence_backward, gives=lambda dh, *_, **__: (dh, dh, 0.0))
