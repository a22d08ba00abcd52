"""Lesson 07: Mamba in parallel.

What:  A state space layer cut over ranks.  Over tp by channels and heads, each projection by itself; over cp by tokens, where a
       rank hands on a summary of its run, (decay, state), and the last inputs of the conv; or changes tokens for heads.
Why:   What attention has to send grows with the sequence.  A state does not: it is all that a token may know of those before it.
       And a scan is a merge of summaries, so ranks may compose them in a chain, all at once, or in log2 rounds.

Run:   python lessons/07_mamba_parallel.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/07_mamba_parallel.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages of the prefix scan
       ... --fault NAME        plant a real mistake, such as halo-gradient-dropped, and see which check finds it; it ends red
       ... --mine FILE         judge your own merge(first, second) of two runs of tokens: each is a Summary of refpar.nn.scan, decay
                               [B, M] and state [B, M, P, N]; a run takes a state h to decay h + state
"""
from dataclasses import replace
from fractions import Fraction

import numpy as np

from refpar import lesson, watch
from refpar.clock import ClockWorld, Link, everywhere
from refpar.comm.mesh import Axis, Mesh
from refpar.config import PRESETS, Layout, share
from refpar.imports.families import FAMILIES
from refpar.nn.conv import conv_backward, conv_forward
from refpar.nn.gradient import zeros_like
from refpar.nn.init import initial
from refpar.nn.mamba2 import PROJECTIONS
from refpar.nn.scan import Summary, merge, summary_of_state
from refpar.oracle import faults_state, properties
from refpar.oracle.packed import packed
from refpar.oracle.situation import PROOF, Situation
from refpar.parallel import fill, state
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut
from refpar.plan import traffic

DECAY = np.array([0.5, 0.5, 1.0, 0.25, 0.5, 0.0, 0.5, 0.5])             # of 8 tokens; a document begins at the sixth
INPUT = np.array([1.0, 2.0, 4.0, 8.0, 1.0, 3.0, 5.0, 1.0])
MAMBA1, MAMBA2, LLAMA, HYBRID = (replace(PRESETS[f"{name}-tiny"], blocks=1) for name in ("mamba1", "mamba2", "llama", "hybrid"))
TAPS, FEW = 4, 6                            # of the conv, and tokens that are fewer than a rank would want


class Calls(watch.Ledger):
    """A ledger that counts the collectives too: of each, by its axis, the bytes that this rank sent."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def began(self, axis, operation):
        self.calls.append([axis, 0])

    def message(self, told):
        super().message(told)
        self.calls[-1][1] += told.bytes * (told.way == "send")

    def reductions(self, axis: str) -> int:
        """Those that sent something."""
        return sum(on == axis and sent > 0 for on, sent in self.calls)


def one_layer(wire, config, kind: str, layout: Layout, length: int):
    """The first layer of a kind, down and up: its books of both, and the bytes that the formula promises this rank."""
    mesh = Mesh(layout, wire)
    chain = fill.model(config, mesh)
    name, layer = next((name, layer) for name, layer in chain.layers if name.endswith(kind))
    alone = chain._replace(layers=((name, layer),))
    w = initial(config, alone, 0, np.float64, cut=lambda name, dims: cut(config, dims, mesh), rough=True)[name]
    batch = part_of(packed([0], 1, length, 9, (10_000,)), way_of(config, layout), mesh.axis("cp"))
    x = np.ones((*fill.tokens_here(mesh)(batch).tokens.shape, config.width))
    with watch.watching(Calls()) as down:
        y, after, saved = layer.forward(x, w, batch, layer.start(w, batch))
    with watch.watching(Calls()) as up:
        layer.backward(y, zeros_like(after), saved, w, batch)
    return down, up, promised(mesh, config, kind, length)


def promised(mesh, config, kind: str, length: int) -> int:
    """Bytes that a rank sends for a layer, down and up."""
    return sum(one.bytes for one in traffic.layer(traffic.Here(config, mesh, 1, length, np.float64), kind))


def bytes_of(page: lesson.Page, told) -> tuple[int, bool]:
    """Sent by rank 0; and did every rank send what was promised?"""
    sent = [down.sent()[1] + up.sent()[1] for (down, up, _), _ in told]
    return sent[0], sent == [formula for (_, _, formula), _ in told]


def summary(tokens: slice) -> Summary:
    """Of a run of the eight tokens: h -> decay h + state."""
    total = summary_of_state(np.zeros((1, 1, 1, 1)))
    for decay, x in zip(DECAY[tokens], INPUT[tokens]):
        total = merge(total, Summary(np.full((1, 1), decay), np.full((1, 1, 1, 1), x)))
    return total


def conv_of_few(wire):
    """Tokens 1 to FEW are their own inputs, and every tap is 1: what this rank's conv sees before its tokens, and the gradients."""
    cp = Axis.world(wire)
    mine, carry = share(FEW, cp.size, cp.index), state.gather(cp)
    x, position = np.arange(1.0, FEW + 1)[None, mine, None], np.arange(FEW)[None, mine]
    nothing, w = np.zeros((1, TAPS - 1, 1)), np.ones((TAPS, 1))
    y, _, saved = conv_forward(x, w, np.zeros(1), position, nothing, carry)
    dx, *_ = conv_backward(np.ones_like(y), nothing, saved, w, position, carry)
    return saved["padded"][0, :TAPS - 1, 0], x.ravel(), dx.ravel()


def hand_on(wire, way: str):
    """One summary of 64 numbers and a decay, handed on."""
    cp = Axis.world(wire)
    given = summary_of_state(np.zeros((1, 1, 8, 8)))
    state.CARRIES[way](cp).forward(merge, Summary(given.decay / 2, given.state), given)


def scan_is_a_merge(page: lesson.Page):
    page.say("1. A state of one number: h[t] = a[t] h[t-1] + x[t].  A run of tokens is to it what its summary says:")
    here, h = summary(slice(0, 0)), 0.0
    for decay, x in zip(DECAY, INPUT):
        h = decay * h + x
    for rank in range(page.ranks):
        part = share(len(INPUT), page.ranks, rank)
        own, here = summary(part), merge(here, summary(part))
        page.say(f"  rank {rank}   tokens {part.start} to {part.stop}   decay {own.decay[0, 0]:<8g} state {own.state.item():<8g} "
                 f"after it h = {here.state.item():g}")
    page.check(here.state.item() == h, f"merged, they give the last state of the recurrence, {h:g}")


def projections(page: lesson.Page):
    p = page.ranks
    table = next(array for name, array in FAMILIES["mamba2"].arrays.items() if name.endswith("in_proj.weight"))
    words = {name: PROJECTIONS[name].split()[1] for name in table.pieces.split()[1:]}
    page.say("", f"2. Over tp.  Other libraries keep {', '.join(words)} side by side, as one matrix.  Cut as one, each rank would",
             "   have columns of one kind that it takes for another:")
    parts = [{name: MAMBA2.part(word, p, rank) for name, word in words.items()} for rank in range(p)]
    fused = np.repeat(list(words), [MAMBA2.part(word, 1, 0).stop for word in words.values()])
    right = 0
    for rank, part in enumerate(parts):
        piece = fused[share(len(fused), p, rank)]
        taken = np.repeat(list(part), [one.stop - one.start for one in part.values()])
        same = sum(map(np.str_.__eq__, piece, taken))
        right += same
        page.say(f"  rank {rank}   has {', '.join(f'{name} {(piece == name).sum()}' for name in words if name in piece):<22} "
                 f"takes them for {', '.join(f'{name} {(taken == name).sum()}' for name in words):<30} right {same}")
    page.check((right == len(fused)) == (p == 1), f"of {len(fused)} columns {right} are what they are taken for")
    page.check(all(set().union(*(range(part[name].start, part[name].stop) for part in parts)) == set(range((fused == name).sum()))
                   for name in words), "each cut by itself, in heads and groups, all are: these are the parts that refpar cuts")
    for rank in range(p):
        heads, groups = (MAMBA2.part(word, p, rank) for word in "MG")
        page.say(f"  rank {rank}   heads {heads.start} to {heads.stop}   B and C of groups {groups.start} to {groups.stop}")


def reductions(page: lesson.Page):
    p, found = page.ranks, []
    page.say("", "3. Reductions of a layer over tp, down and up, and bytes sent by rank 0, of 64 tokens.  Mamba-1 makes dt, B and",
             "   C of all channels: one sum more.  Mamba-2 makes them of the layer's input; a shared group has a small one:")
    for what, config, kind in (("mamba1", MAMBA1, "mamba1"), ("mamba2, 8 groups", replace(MAMBA2, groups=8), "mamba2"),
                               ("mamba2, 1 group", replace(MAMBA2, groups=1), "mamba2")):
        told = page.run(one_layer, config, kind, Layout(tp=p), 64)
        ways = [book.reductions("tp") for book in told[0].result[:2]]
        sent, as_promised = bytes_of(page, told)
        found.append(ways)
        page.check(as_promised, f"{what:<17} {ways[0]} down, {ways[1]} up   {sent:>8,} bytes, as the formula says")
    if p <= 8:
        page.check(found == [[n * (p > 1)] * 2 for n in (2, 1, 2)], "two a layer for Mamba-1, one for Mamba-2 with whole groups")


def halo(page: lesson.Page):
    page.say("", f"4. Over cp: a conv of {TAPS} taps, all of them 1, on {FEW} tokens, whose inputs are 1 to {FEW}.  What a rank",
             "   sees comes from several before it, and the gradient of an input is how many outputs see it, on whatever rank:")
    told = [one for one, _ in page.run(conv_of_few)]
    for rank, (seen, mine, dx) in enumerate(told):
        mine, seen, dx = (str(array.astype(int).tolist()) for array in (mine, seen, dx))
        page.say(f"  rank {rank}   inputs {mine:<14} before them {seen:<10} gradient {dx}")
    padded = np.concatenate([np.zeros(TAPS - 1), np.arange(1, FEW + 1)])
    starts = [share(FEW, page.ranks, rank).start for rank in range(page.ranks)]
    page.check(all((seen == padded[start:start + TAPS - 1]).all() for start, (seen, _, _) in zip(starts, told) if start < FEW),
               "every rank sees the last inputs before its own")
    page.check(np.concatenate([dx for _, _, dx in told]).tolist() == [min(TAPS, FEW - t) for t in range(FEW)],
               "and every gradient has come back to its owner, and is added there")


def over_cp(page: lesson.Page):
    p = page.ranks
    page.say("", f"5. Bytes that rank 0 sends over cp for a layer, down and up, of 64 tokens, and of {FEW}, as promised:")
    cases = [(way, MAMBA2, way, "ring") for way in (*state.CARRIES, "heads")]
    cases += [(f"{way}, zig-zag", HYBRID, way, "zigzag") for way in ("gather", "heads")]
    for what, config, way, order in cases:
        layout = Layout(cp=p, cp_attention=order, cp_mamba=way)
        told = {length: page.run(one_layer, config, "mamba2", layout, length) for length in (64, FEW)}
        (long, right), (short, right_too) = (bytes_of(page, one) for one in told.values())
        page.check(right and right_too, f"{what:<16} {long:>9,} {short:>9,}")
        if what == "scan":
            page.show(told[FEW], lambda array: f"{array.nbytes} bytes of summaries")
    page.say("   A hybrid's stream has attention's order: to hand on states, tokens are led to runs and back; not so by heads.")


def time_of_carries(page: lesson.Page):
    page.say("", "6. Virtual time to hand one summary on, and what lies behind the rows to all, where its message takes 1:",
             f"  {'ranks':>7}" + "".join(f"{way:>9}" for way in state.CARRIES))
    right = []
    for ranks in (2, 4, 8, 16):
        times = []
        for way in state.CARRIES:
            clock = ClockWorld(everywhere(Link(beta=Fraction(1, 65 * 8))))
            clock.run(hand_on, ranks, way)
            times.append(clock.makespan)
        rounds = (ranks - 1).bit_length()
        right.append(times == [ranks - 1, ranks - 1 + rounds, 2 * rounds])
        page.say(f"  {ranks:>7}" + "".join(f"{int(time):>9}" for time in times))
    page.check(all(right), "c-1 gathered; c-1 in a chain, and log2 c to tell all; log2 c by prefix scan, and log2 c to tell all")


def comparison(page: lesson.Page):
    p = page.ranks
    ways = {"tp + sp": (LLAMA, "attention", Layout(tp=p, sp=True)), "ring": (LLAMA, "attention", Layout(cp=p)),
            "ulysses": (LLAMA, "attention", Layout(cp=p, cp_attention="ulysses")),
            " tp + sp": (MAMBA2, "mamba2", Layout(tp=p, sp=True)), "heads": (MAMBA2, "mamba2", Layout(cp=p, cp_mamba="heads")),
            "states": (MAMBA2, "mamba2", Layout(cp=p, cp_mamba="gather"))}
    page.say("", f"7. Transformer against Mamba: bytes that rank 0 of {p} sends for one layer, down and up, as the sequence grows:",
             f"  {'tokens':>8}   {'attention:':<42}mamba2:", f"  {'':>8}" + "".join(f"{way.strip():>14}" for way in ways))
    right = True
    for length in (64, 256):
        row = [bytes_of(page, page.run(one_layer, *way, length)) for way in ways.values()]
        right &= all(as_promised for _, as_promised in row)
        page.say(f"  {length:>8}" + "".join(f"{sent:>14,}" for sent, _ in row))
    for length in (1024, 16_384, 262_144):
        row = [promised(traffic.mesh_of(layout, 0), config, kind, length) for config, kind, layout in ways.values()]
        page.say(f"  {length:>8}" + "".join(f"{sent:>14,}" for sent in row))
    page.check(right, "up to 256 tokens counted, and on every rank as the formula says; beyond, the formula")
    page.say("   A state is as large after a million tokens as after one: it is all that a token may know of those before it.")


def teach(page: lesson.Page):
    for section in (scan_is_a_merge, projections, reductions, halo, over_cp, time_of_carries, comparison):
        section(page)
    page.say("", "8. Whole models: loss, all gradients, weights and moments, with documents across the borders of shards:")
    p, short = page.ranks, replace(PROOF, rows=2, sequence=11)
    one, two = (replace(PRESETS[name], blocks=1) for name in ("mamba1-uneven", "mamba2-uneven"))
    for config, way, what in ((one, "gather", "Mamba-1, summaries gathered"), (one, "heads", "Mamba-1 by channels"),
                              (two, "chain", "Mamba-2 in a chain"), (two, "scan", "Mamba-2 in a prefix scan"),
                              (two, "heads", "Mamba-2 by heads")):
        layout = Layout(cp=p, cp_mamba=way)
        page.prove(properties.sharded_equals_single, Situation(config, layout, short, 0, (5, 16), (0.0, 0.4)), what)
    both = Layout(cp=p, cp_attention="zigzag", cp_mamba="chain")
    page.prove(properties.sharded_equals_single, Situation(PRESETS["hybrid-uneven"], both, short, 0, (5, 16), (0.0, 0.4)),
               "a hybrid: tokens led from zig-zag to runs and back")
    if page.fault:
        seen = "" if page.failed else "  It was not seen: here it hides."
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.{seen}")
    page.judge("9.", [properties.sharded_equals_single],
               [Situation(two, Layout(cp=ranks), short, 0, (5, 16)) for ranks in (1, 2, 3, 4)])


if __name__ == "__main__":
    lesson.main(teach, mine=merge, gives=lambda first, second: Summary(*second), faults=faults_state.STATE_OVER_RANKS)
