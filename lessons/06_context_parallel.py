"""Lesson 06: context parallel attention.

What:  The ranks share the tokens of each row.  Everything but attention works on each token alone; attention needs the keys and values
       of all earlier tokens, wherever they are.  Here they travel round a ring, are gathered, or change places with heads.
Why:   A long sequence fits on no rank: what backward needs grows with its tokens.  How the tokens are dealt out decides whether all
       ranks have as much to do, for a causal token at the end of a row sees more than one at its beginning.

Run:   python lessons/06_context_parallel.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/06_context_parallel.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages of the ring
       ... --fault NAME        plant a real mistake, such as local-lse, and see which check finds it: the lesson ends red
       ... --mine FILE         judge your own merge(a, b): a and b are attention over two sets of keys, each with out [B, S, H, E] and
                               lse [B, S, H]; return the same over both, Attended(out, lse) of refpar.nn.blocks.  A side may have
                               seen no key at all: out 0, lse -inf
"""
from dataclasses import replace

import numpy as np

from refpar import lesson
from refpar.clock import ClockWorld, Link, everywhere, peak
from refpar.comm.mesh import Mesh
from refpar.config import PRESETS, Layout, share
from refpar.nn import attention, blocks
from refpar.nn.blocks import Attended, merge
from refpar.oracle import equal, faults_cp, properties
from refpar.oracle.packed import packed
from refpar.oracle.situation import PROOF, Situation
from refpar.parallel.order import columns, part_of
from refpar.parallel.ulysses import context_core
from refpar.plan.volume_cp import Cut, context_volume

HEADS, KEYS, WIDTH, LENGTH, LONG = 4, 2, 8, 24, 1024
WAYS = ("ring", "zigzag", "striped", "gather", "ulysses", "ulysses+ring")


def drawn(length: int):
    """One row, one document: its batch, and the queries, keys and values of all tokens."""
    random = np.random.default_rng(0)
    return packed([0], 1, length, 9, (10_000,)), *(random.standard_normal((1, length, heads, WIDTH)) for heads in (HEADS, KEYS, KEYS))


def attend(wire, way: str, length: int = LENGTH):
    """This rank's tokens in the order of a way, and what attention gives for them; forward only."""
    cp, (whole, *arrays) = Mesh(Layout(cp=wire.size), wire).axis("cp"), drawn(length)
    mine, batch = columns(way, length, cp.size, cp.index), part_of(whole, way, cp)
    core = context_core(cp, way, KEYS, plan=blocks.remembering(cp.size))
    q, k, v = (np.ascontiguousarray(x[:, mine]) for x in arrays)
    out, _, _ = core.forward(q, k, v, batch, attention.start(batch, KEYS, WIDTH, q.dtype))
    return {"mine": mine, "out": out}


def teach(page: lesson.Page):
    p = page.ranks
    batch, q, k, v = drawn(LENGTH)
    places = attention.places(batch)
    whole, _, _ = blocks.core().forward(q, k, v, batch, attention.start(batch, KEYS, WIDTH, q.dtype))

    page.say(f"1. One row of {LENGTH} tokens on {lesson.count(p, 'rank')}, and the pairs of tokens that each has to look at:")
    for way in ("ring", "zigzag", "striped"):
        told = [columns(way, LENGTH, p, rank) for rank in range(p)]
        pairs = (f"rank {rank}: {sum(token + 1 for token in mine.tolist()):>3}" for rank, mine in enumerate(told))
        page.say(f"  {way:<8} {'   '.join(pairs)}")
    page.say(f"  zigzag: rank 0 has {columns('zigzag', LENGTH, p, 0).tolist()}, an early run and a late one.")

    page.say("", "2. Attention over some keys is (out, lse): an average of values, and the log of what it was divided by.  Of the last",
             "  token:")
    last = attention.Places(*(place[:, LENGTH - 1:] for place in places))
    total = None
    for rank in range(p):
        part = share(LENGTH, p, rank)
        keys = attention.Places(*(place[:, part] for place in places))
        some = blocks.partial(q[:, LENGTH - 1:], k[:, part], v[:, part], last, keys)
        total = some if total is None else merge(total, some)
        page.say(f"  keys of rank {rank}   lse {some.lse[0, 0, 0]:>#9.5g}   merged so far {total.lse[0, 0, 0]:>#9.5g}")
    page.check(equal.distance(total.out, whole[:, LENGTH - 1:], LENGTH) <= 1, "merged in any order, it is attention over all keys")

    page.say("", "3. Six ways to meet all keys; each gives every rank what the single process has for its tokens:")
    for way in WAYS:
        told = page.run(attend, way)
        far = [rank for rank, (one, _) in enumerate(told) if not equal.distance(one["out"], whole[:, one["mine"]], LENGTH) <= 1]
        cut = Cut(p, way, 1, LENGTH, HEADS, KEYS, WIDTH, 8)
        promised = [context_volume(rank, cut)[0][:2] for rank in range(p)]
        counted = [diary.sent() for _, diary in told]
        page.check(not far and counted == [tuple(one) for one in promised],
                   f"{way:<13} equal; messages (bytes) sent by rank 0: {counted[0][0]} ({counted[0][1]:,})")
        if way == "ring":
            page.show(told, lambda array: f"keys and values of {array.shape[2]} tokens")

    page.say("", f"4. Time, of {LONG} tokens, where a hop takes 1 and a rank does a million operations in that time:")
    for way in ("ring", "zigzag", "striped"):
        clock = ClockWorld(everywhere(Link(alpha=1)), peak(10**6))
        clock.run(attend, p, way, LONG)
        busy = [one.busy for one in clock.clocks]
        page.say(f"  {way:<8} makespan {float(clock.makespan):>6.1f}   busy from {float(min(busy)):>5.1f} to {float(max(busy)):>5.1f}")
    page.say("  A hop is posted before the block at hand is computed, and hides behind it; balance decides how long the ring takes.")

    page.say("", "5. A whole model: loss, all gradients, weights and moments, with documents across the borders of shards:")
    short, model = replace(PROOF, rows=2, sequence=11), replace(PRESETS["llama-uneven"], blocks=1)
    for way in WAYS:
        page.prove(properties.sharded_equals_single, Situation(model, Layout(cp=p, cp_attention=way), short, 0, (5, 16), (0.0, 0.4)), way)
    if page.fault:
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.")
    page.judge("6.", [properties.sharded_equals_single],
               [Situation(model, Layout(cp=ranks), short, 0, (5, 16), (0.0, 0.4)) for ranks in (1, 2, 3, 4)])


if __name__ == "__main__":
    lesson.main(teach, mine=merge, gives=lambda a, b: Attended(a.out, a.lse), faults=faults_cp.CONTEXT_PARALLEL)
