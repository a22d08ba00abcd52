"""Lesson 07: Mamba in parallel.

What:  A state space layer cut over ranks.  Over tp by channels and heads, each projection by itself; over cp by tokens, where a rank
       hands on a summary of its run, (decay, state), and the last inputs of the conv.
Why:   What attention has to send grows with the sequence.  A state does not: it is all that a token may know of those before it.  And
       a scan is a merge of summaries, so ranks may compose them in a chain, all at once, or in log2 rounds.

Run:   python lessons/07_mamba_parallel.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/07_mamba_parallel.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages of the prefix scan
       ... --fault NAME        plant a real mistake, such as halo-gradient-dropped, and see which check finds it: the lesson ends red
       ... --mine FILE         judge your own merge(first, second) of two runs of tokens: each is a Summary of refpar.nn.scan, decay
                               [B, M] and state [B, M, P, N]; a run takes a state h to decay h + state
"""
from dataclasses import replace

import numpy as np

from refpar import lesson, watch
from refpar.comm.mesh import Mesh
from refpar.config import PRESETS, Layout, share
from refpar.nn.gradient import zeros_like
from refpar.nn.init import initial
from refpar.nn.scan import Summary, merge
from refpar.oracle import faults_state, properties
from refpar.oracle.packed import packed
from refpar.oracle.situation import PROOF, Situation
from refpar.parallel import fill
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut
from refpar.plan.volume_cp import Cut, context_volume
from refpar.plan.volume_state import StateCut, state_volume

DECAY = np.array([0.5, 0.5, 1.0, 0.25, 0.5, 0.0, 0.5, 0.5])             # of 8 tokens; a document begins at the sixth
INPUT = np.array([1.0, 2.0, 4.0, 8.0, 1.0, 3.0, 5.0, 1.0])
MAMBA1, MAMBA2, LLAMA = (replace(PRESETS[name], blocks=1) for name in ("mamba1-tiny", "mamba2-tiny", "llama-tiny"))
WAYS = ("gather", "chain", "scan", "heads")


def summary(tokens: slice) -> Summary:
    """Of a run of the eight tokens: h -> decay h + state."""
    total = Summary(np.ones((1, 1)), np.zeros((1, 1, 1, 1)))
    for decay, x in zip(DECAY[tokens], INPUT[tokens]):
        total = merge(total, Summary(np.full((1, 1), decay), np.full((1, 1, 1, 1), x)))
    return total


def one_layer(wire, config, layout: Layout, length: int):
    """Forward and backward of the model's first layer on a mesh, and what was sent in each."""
    mesh = Mesh(layout, wire)
    chain = fill.model(config, mesh)
    params = initial(config, chain, 0, np.float64, cut=lambda name, dims: cut(config, dims, mesh), rough=True)
    name, layer = chain.layers[1]
    batch = part_of(packed([0], 1, length, 9, (10_000,)), way_of(config, layout), mesh.axis("cp"))
    x = np.ones((*batch.tokens.shape, config.width))
    with watch.watching(watch.Ledger()) as ledger:
        y, after, saved = layer.forward(x, params[name], batch, layer.start(params[name], batch))
        layer.backward(y, zeros_like(after), saved, params[name], batch)
    return {axis: sum(size for (way, on, _), size in ledger.bytes.items() if (way, on) == ("send", axis)) for axis in ("tp", "cp")}


def teach(page: lesson.Page):
    p = page.ranks
    page.say("1. A state of one number: h[t] = a[t] h[t-1] + x[t].  A run of tokens is to it what its summary says, (decay, state):")
    here, h = Summary(np.ones((1, 1)), np.zeros((1, 1, 1, 1))), 0.0
    for decay, x in zip(DECAY, INPUT):
        h = decay * h + x
    for rank in range(p):
        part = share(len(INPUT), p, rank)
        own, here = summary(part), merge(here, summary(part))
        page.say(f"  rank {rank}   tokens {part.start} to {part.stop}   decay {own.decay[0, 0]:<8g} state {own.state.item():<8g} "
                 f"after it h = {here.state.item():g}")
    page.check(here.state.item() == h, f"merged, they give the last state of the recurrence, {h:g}")

    page.say("", "2. Over tp each projection is cut by itself.  Other libraries keep them side by side, as one matrix; cut as one, rank 0",
             "  would have:")
    names = {"z": "MP", "x": "MP", "B": "GN", "C": "GN", "dt": "M"}
    widths = {name: MAMBA2.dim(word)[0] for name, word in names.items()}
    mine, left = sum(widths.values()) // max(p, 2), {}
    for name, width in widths.items():
        left[name] = min(width, mine - sum(left.values()))
    page.say(f"  cut as one       {'  '.join(f'{name} {left[name]} of {widths[name]}' for name in names)}")
    each = {name: len(range(widths[name])[MAMBA2.part(word, p, 0)]) for name, word in names.items()}
    page.say(f"  cut each         {'  '.join(f'{name} {each[name]} of {widths[name]}' for name in names)}")
    page.check(left["x"] == 0 or left["dt"] == 0, "cut as one, some rank has no dt at all for its heads")

    page.say("", "3. What a layer sends over tp, forward and backward, 64 tokens.  Mamba-1 makes dt, B and C of all channels: a sum more.")
    told = {name: page.run(one_layer, config, Layout(tp=p), 64) for name, config in (("mamba1", MAMBA1), ("mamba2", MAMBA2))}
    for name, ranks in told.items():
        page.say(f"  {name}   {ranks[0][0]['tp']:>9,} bytes by rank 0")
    page.check(p == 1 or told["mamba1"][0][0]["tp"] > told["mamba2"][0][0]["tp"], "Mamba-1 sends more, on more than one rank")

    page.say("", "4. Over cp, 64 tokens and 6 (some ranks then have fewer tokens than the conv has taps):")
    for way in WAYS:
        counted = {length: page.run(one_layer, MAMBA2, Layout(cp=p, cp_mamba=way), length) for length in (64, 6)}
        cuts = {length: StateCut(MAMBA2, "mamba2", way, "contiguous", p, 1, length) for length in counted}
        promised = {length: [sum(part.elements for part in state_volume(rank, cuts[length])) for rank in range(p)] for length in cuts}
        page.check(all([one["cp"] for one, _ in counted[length]] == promised[length] for length in counted),
                   f"{way:<7} rank 0 sends {promised[64][0]:>8,} and {promised[6][0]:>8,} bytes, as the formula says")
        if way == "scan":
            page.show(counted[6], lambda array: f"{array.nbytes} bytes of summaries")

    page.say("", "5. Bytes that a rank of 4 sends for one layer, forward and backward, as the sequence grows (float64, these tiny layers):",
             f"  {'tokens':>8}" + "".join(f"{head:>16}" for head in ("attention ring", "ulysses", "mamba2 heads", "mamba2 gather")))
    for length in (64, 256, 1024, 4096):
        row = [sum(part.elements for part in context_volume(0, Cut(4, way, 1, length, LLAMA.heads, LLAMA.kv_heads, LLAMA.head_width, 8)))
               for way in ("ring", "ulysses")]
        row += [sum(part.elements for part in state_volume(0, StateCut(MAMBA2, "mamba2", way, "contiguous", 4, 1, length)))
                for way in ("heads", "gather")]
        page.say(f"  {length:>8}" + "".join(f"{size:>16,}" for size in row))
    page.say("  A state is as large after a million tokens as after one.")

    page.say("", "6. Whole models: loss, all gradients, weights and moments, with documents across the borders of shards:")
    short = replace(PROOF, rows=2, sequence=11)
    for name, way, what in (("mamba1-uneven", "gather", "Mamba-1, summaries gathered"), ("mamba1-uneven", "heads", "Mamba-1 by channels"),
                            ("mamba2-uneven", "chain", "Mamba-2 in a chain"), ("mamba2-uneven", "scan", "Mamba-2 in a prefix scan"),
                            ("mamba2-uneven", "heads", "Mamba-2 by heads")):
        page.prove(properties.sharded_equals_single,
                   Situation(replace(PRESETS[name], blocks=1), Layout(cp=p, cp_mamba=way), short, 0, (5, 16), (0.0, 0.4)), what)
    both = Layout(cp=p, cp_attention="zigzag", cp_mamba="chain")
    page.prove(properties.sharded_equals_single, Situation(PRESETS["hybrid-uneven"], both, short, 0, (5, 16), (0.0, 0.4)),
               "a hybrid: tokens led from zig-zag to runs and back")
    if page.fault:
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.")
    page.judge("7.", [properties.sharded_equals_single],
               [Situation(replace(PRESETS["mamba2-uneven"], blocks=1), Layout(cp=ranks), short, 0, (5, 16)) for ranks in (1, 2, 3, 4)])


if __name__ == "__main__":
    lesson.main(teach, mine=merge, gives=lambda first, second: Summary(*second), faults=faults_state.STATE_OVER_RANKS)
