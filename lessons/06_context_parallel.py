"""Lesson 06: context parallel attention.

What:  The ranks share the tokens of each row.  Everything but attention works on each token alone; attention needs the keys and
       values of all earlier tokens, wherever they are.  Here they travel round a ring, are gathered, or change places with heads.
Why:   A long sequence fits on no rank: what backward needs grows with its tokens.  How the tokens are dealt out decides whether all
       ranks have as much to do, for a causal token at the end of a row sees more than one at its beginning.

Run:   python lessons/06_context_parallel.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/06_context_parallel.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages of the ring, down and up
       ... --fault NAME        plant a real mistake, such as local-lse, and see which check finds it: the lesson ends red
       ... --mine FILE         judge your own merge(a, b): a and b are attention over two sets of keys, each with out [B, S, H, E]
                               and lse [B, S, H]; return the same over both, Attended(out, lse) of refpar.nn.blocks.  A side may
                               have seen no key at all: out 0, lse -inf
"""
from dataclasses import replace
from fractions import Fraction
from functools import reduce

import numpy as np

from refpar import lesson, watch
from refpar.clock import ClockWorld, Link, everywhere, peak
from refpar.comm.mesh import Mesh
from refpar.config import PRESETS, Layout, share
from refpar.contrast.pass_q import ring_q
from refpar.nn import attention, blocks
from refpar.nn.blocks import Attended, merge
from refpar.oracle import equal, faults_cp, properties, properties_cp
from refpar.oracle.packed import packed
from refpar.oracle.situation import PROOF, Situation
from refpar.oracle.situation_cp import ContextSituation
from refpar.parallel.order import columns, part_of
from refpar.parallel.ulysses import context_core, head_parts
from refpar.plan.volume_cp import Cut, context_volume

HEADS, KEYS, WIDTH, LENGTH, LONG = 4, 2, 8, 24, 1024
ORDERS = ("ring", "zigzag", "striped")
WAYS = (*ORDERS, "gather", "ulysses", "ulysses+ring")
FORMS = {way: (way, "kv", None) for way in WAYS} | {"ring of q": ("ring", "q", None), "double ring": ("ring", "kv", 2)}
SPEED, SHORT = 10**6, 256               # operations in a unit of time, and the shortest run of tokens whose hop shall hide
BANDWIDTH = KEYS * 8 * SPEED // (HEADS * SHORT)                         # bytes in a unit of time


def drawn(length: int):
    """One row, one document: its batch; queries, keys and values of all tokens; and the gradient of what attention gives."""
    random = np.random.default_rng(0)
    arrays = (random.standard_normal((1, length, heads, WIDTH)) for heads in (HEADS, KEYS, KEYS, HEADS))
    return packed([0], 1, length, 9, (10_000,)), *arrays


def down_and_up(core, batch, q, k, v, dout):
    """What attention gives, and the gradients of q, k and v; and what was sent and done, down and up."""
    with watch.watching(watch.Ledger()) as down:
        out, after, saved = core.forward(q, k, v, batch, attention.start(batch, KEYS, WIDTH, q.dtype))
    with watch.watching(watch.Ledger()) as up:
        *grads, _ = core.backward(dout, {"k": 0 * after["k"], "v": 0 * after["v"]}, saved, batch)
    return (out, *grads), (down, up)


def attend(wire, form: str, length: int = LENGTH):
    """This rank's tokens in the order of a form, what it makes of them, and its ledgers."""
    way, moved, node = FORMS[form]
    cp, (whole, *arrays) = Mesh(Layout(cp=wire.size), wire, node).axis("cp"), drawn(length)
    plan, mine = blocks.remembering(cp.size), columns(way, length, cp.size, cp.index)
    core = ring_q(cp, way, plan=plan) if moved == "q" else context_core(cp, way, KEYS, plan=plan)
    made, books = down_and_up(core, part_of(whole, way, cp), *(np.ascontiguousarray(x[:, mine]) for x in arrays))
    return mine, made, books


def forward(wire, way: str, length: int):
    """Down only, for the clock."""
    cp, (whole, *arrays) = Mesh(Layout(cp=wire.size), wire).axis("cp"), drawn(length)
    mine, batch = columns(way, length, cp.size, cp.index), part_of(whole, way, cp)
    q, k, v, _ = (np.ascontiguousarray(x[:, mine]) for x in arrays)
    core = context_core(cp, way, KEYS, plan=blocks.remembering(cp.size))
    core.forward(q, k, v, batch, attention.start(batch, KEYS, WIDTH, q.dtype))


def balance(page: lesson.Page):
    p, busiest = page.ranks, {}
    page.say(f"1. One row of {LONG} tokens on {lesson.count(p, 'rank')}: the pairs of tokens that each must look at, in thousands;",
             "   the operations that it did, in millions; and when the last was done, if a hop takes 1, and a million operations:")
    for way in ORDERS:
        clock = ClockWorld(everywhere(Link(alpha=1)), peak(SPEED))
        clock.run(forward, p, way, LONG)
        pairs = [sum(token + 1 for token in columns(way, LONG, p, rank).tolist()) / 1000 for rank in range(p)]
        busiest[way] = max(clock.clocks, key=lambda one: one.busy).busy
        page.say(f"  {way:<8} pairs {'  '.join(f'{count:>6.1f}' for count in pairs)}   "
                 f"done {'  '.join(f'{float(one.busy):>5.1f}' for one in clock.clocks)}   makespan {float(clock.makespan):>6.1f}")
    page.say(f"  Of {LENGTH} tokens rank 0 has, in zigzag: {', '.join(map(str, columns('zigzag', LENGTH, p, 0)))}.")
    page.check(max(busiest.values()) == busiest["ring"], "dealt out in turn, nobody has more to do than the last rank of the ring")
    page.say("   Scores are computed in blocks, hidden ones too.  Striping hides half of each, so it does more for as many pairs.")


def merging(page: lesson.Page, batch, q, k, v, whole):
    p, last = page.ranks, attention.Places(*(place[:, LENGTH - 1:] for place in attention.places(batch)))
    page.say("", "2. Attention over some keys is (out, lse): an average of values, and the log of what it was divided by.",
             f"   The last token of {LENGTH} meets the keys as they come round, first those of its own rank:")
    some = []
    for rank in reversed(range(p)):
        part = share(LENGTH, p, rank)
        keys = attention.Places(*(place[:, part] for place in attention.places(batch)))
        some.append(blocks.partial(q[:, LENGTH - 1:], k[:, part], v[:, part], last, keys))
        total = reduce(merge, some)
        own, merged = (f"lse {one.lse.flat[0]:>#8.5g}  out {one.out.flat[0]:>#9.4g}" for one in (some[-1], total))
        page.say(f"  keys of rank {rank}   {own}   merged so far   {merged}")
    both = [equal.distance(reduce(merge, order).out, whole[:, LENGTH - 1:], LENGTH) <= 1 for order in (some, some[::-1])]
    page.check(all(both), "merged from either end, it is attention over all keys")


def forms(page: lesson.Page, whole):
    p = page.ranks
    page.say("", "3. Forms that meet all keys: output, dq, dk and dv are those of a single process.  Messages (bytes) sent by",
             "   rank 0 down, and up, where keys and values go round once more, and their gradients follow them home:")
    for form, (way, moved, node) in FORMS.items():
        told = page.run(attend, form)
        far = [name for (mine, made, _), _ in told for name, got, of_all in zip(("out", "dq", "dk", "dv"), made, whole)
               if not equal.distance(got, of_all[:, mine], LENGTH * HEADS, np.abs(of_all).max()) <= 1]
        cut = Cut(p, way, 1, LENGTH, HEADS, KEYS, WIDTH, 8, node, moved)
        promised = [[(one.messages, one.elements) for one in context_volume(rank, cut)] for rank in range(p)]
        counted = [[book.sent() for book in books] for (_, _, books), _ in told]
        down, up = (f"{messages:>2} ({size:>6,})" for messages, size in counted[0])
        wrong = f": not {far[0]}" if far else "" if counted == promised else f": by the formula {promised[0]}"
        page.check(not wrong, f"{form:<13} down {down}   up {up}{wrong}")
        if form == "ring":
            page.show(told, lambda array: f"keys and values of {lesson.count(array.shape[2], 'token')}, or their gradients")
    page.say(f"   Ulysses deals out {HEADS} query heads with their {KEYS} key heads; more ranks than those share a key head:")
    parts = head_parts(HEADS, KEYS, p)
    for rank, (mine, key) in enumerate(parts):
        page.say(f"  rank {rank}   query heads {list(range(HEADS))[mine]}   key heads {list(range(KEYS))[key]}")
    page.check(sum((list(range(HEADS))[mine] for mine, _ in parts), []) == list(range(HEADS)), "every query head is one rank's")


def hiding(page: lesson.Page):
    right = []
    page.say("", "4. A hop is posted before the block at hand is computed, and hides behind it; in zig-zag, on 4 ranks, if",
             "     2 (S/c)^2 H E / speed >= 2 (S/c) K E bytes / bandwidth",
             f"   so from S/c = K bytes speed / (H bandwidth) tokens on, here {SHORT}:")
    for run in (SHORT // 2, SHORT, SHORT * 3 // 2):
        clock = ClockWorld(everywhere(Link(beta=Fraction(1, BANDWIDTH))), peak(SPEED))
        clock.run(forward, 4, "zigzag", 4 * run)
        block, hop = 2 * run**2 * HEADS * WIDTH / SPEED, 2 * run * KEYS * WIDTH * 8 / BANDWIDTH
        waited = max(one.exposed for one in clock.clocks)
        right.append((waited > 0) == (run < SHORT))
        page.say(f"  S/c {run:>4}   a block {block:>7.3f}   a hop {hop:>7.3f}   of three hops waited for {float(waited):>6.3f}")
    page.check(all(right), f"from {SHORT} tokens a rank on nothing is waited for, and with fewer something is")


def teach(page: lesson.Page):
    batch, *arrays = drawn(LENGTH)
    whole, _ = down_and_up(blocks.core(), batch, *arrays)
    balance(page)
    merging(page, batch, *arrays[:3], whole[0])
    forms(page, whole)
    hiding(page)
    page.say("", "5. Loud scores, and documents that leave a rank no key to see; then a whole model, its gradients and two steps:")
    hard = ContextSituation(ranks=page.ranks, tokens=9, documents=(5, 9), loud=1000.0)
    for moved in ("kv", "q"):
        page.prove(properties_cp.context_attention, replace(hard, moved=moved), f"ring of {moved}, exp(score) beyond all numbers")
    short, model = replace(PROOF, rows=2, sequence=11), replace(PRESETS["llama-uneven"], blocks=1)
    for way in WAYS:
        layout = Layout(cp=page.ranks, cp_attention=way)
        page.prove(properties.sharded_equals_single, Situation(model, layout, short, 0, (5, 16), (0.0, 0.4)), way)
    if page.fault:
        seen = "" if page.failed else "  It was not seen: here it hides."
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.{seen}")
    page.judge("6.", [properties.sharded_equals_single],
               [Situation(model, Layout(cp=ranks), short, 0, (5, 16), (0.0, 0.4)) for ranks in (1, 2, 3, 4)])


if __name__ == "__main__":
    lesson.main(teach, mine=merge, gives=lambda a, b: Attended(a.out, a.lse), faults=faults_cp.CONTEXT_PARALLEL)
