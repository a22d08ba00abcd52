"""What is true of attention cut over context-parallel ranks, by every option.  A property raises one sentence, or returns.

The ranks run with their shards; the single process, outside the world, runs `blocks.core` on whole rows, and judges.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.mesh import Axis
from refpar.contrast.pass_q import ring_q
from refpar.nn import attention, blocks
from refpar.oracle.equal import distance
from refpar.oracle.freeze import lent
from refpar.oracle.properties_comm import require
from refpar.oracle.situation_cp import ContextSituation, Drawn
from refpar.parallel.order import columns, part_of
from refpar.parallel.ulysses import context_core
from refpar.plan.volume_cp import Cut, context_volume


class Attention(NamedTuple):
    """What attention made, of all tokens or of a rank's."""
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class Told(NamedTuple):
    """What a rank tells: its shard, and what it sent, (messages, bytes) forward and backward."""
    shard: Attention
    sent: tuple[tuple[int, int], tuple[int, int]]


def run_rank(wire, situation: ContextSituation, changed=None) -> Told:
    """The program of one rank: cut what it holds, attend, and go back."""
    cp = Axis("cp", tuple(range(wire.size)), wire.rank, wire, situation.node)
    mine = columns(situation.way, situation.length, cp.size, cp.index)
    batch = part_of(situation.batch(), situation.way, cp)
    q, k, v, dout = (np.ascontiguousarray(x[:, mine]) for x in situation.drawn(changed))
    plan = blocks.remembering(cp.size)
    core = ring_q(cp, situation.way, situation.drop(0), situation.reach, plan) if situation.moved == "q" else \
        context_core(cp, situation.way, situation.kv_heads, situation.drop, situation.reach, plan)
    before = attention.start(batch, situation.kv_heads, situation.width, q.dtype)
    core = core._replace(forward=lent(core.forward), backward=lent(core.backward))      # and nobody writes into what is lent
    with watch.watching(watch.Ledger()) as forward:
        out, after, saved = core.forward(q, k, v, batch, before)
    dafter = {name: np.zeros_like(after[name]) for name in ("k", "v")}
    with watch.watching(watch.Ledger()) as backward:
        *grads, _ = core.backward(dout, dafter, saved, batch)
    return Told(Attention(out, *grads), (forward.sent("cp"), backward.sent("cp")))


def alone(situation: ContextSituation) -> Attention:
    """The single process."""
    batch, (q, k, v, dout) = situation.batch(), situation.drawn()
    core = blocks.core(situation.drop(), situation.reach)
    out, after, saved = core.forward(q, k, v, batch, attention.start(batch, situation.kv_heads, situation.width, q.dtype))
    *grads, _ = core.backward(dout, {"k": 0, "v": 0}, saved, batch)
    return Attention(out, *grads)


def unsharded(situation: ContextSituation, shards: list[Attention]) -> Attention:
    """All ranks' tokens, back in the order of the rows."""
    order = np.concatenate([columns(situation.way, situation.length, situation.ranks, rank) for rank in range(situation.ranks)])
    return Attention(*(np.concatenate(parts, axis=1)[:, np.argsort(order)] for parts in zip(*shards)))


def scales(situation: ContextSituation, drawn: Drawn) -> Attention:
    """The largest addend of each result: a probability is at most 1, and dp - delta, which cancels where a query sees one key, as
    large as the largest product of a dout with a v."""
    q, k, v, dout = (float(np.max(np.abs(x), initial=0.0)) for x in drawn)
    kept = 1 / (1 - situation.dropout)
    dp = dout * v * kept * situation.width ** 0.5               # of numbers of random sign, times the scale of the scores
    return Attention(v * kept, dp * k, dp * q, dout * kept)


def context_attention(world, situation: ContextSituation):
    """Attention over context-parallel ranks is attention: outputs, dq, dk and dv, put together, equal the single process's; and a
    token that is changed moves nothing, bitwise, that may not see it, on whatever rank."""
    shards = [told.shard for told in world.run(run_rank, situation.ranks, situation)]
    held = sum(shard.out.shape[1] for shard in shards)
    require(held == situation.length, f"the ranks hold {held} of {situation.length} tokens of a row, in {situation}")
    got, expected = unsharded(situation, shards), alone(situation)
    n = max(situation.length * max(1, situation.heads // situation.kv_heads), situation.width)
    for name, scale in scales(situation, situation.drawn())._asdict().items():
        one, other = getattr(got, name), getattr(expected, name)
        require(one.dtype == other.dtype and one.shape == other.shape,
                f"{name} is {one.dtype} {list(one.shape)}, and alone it is {other.dtype} {list(other.shape)}, in {situation}")
        apart = distance(one, other, n, scale)
        require(apart <= 1, f"{name} is {apart:.3g} times the bound away from the single process, in {situation}")
    _sees_only_what_it_may(world, situation, got.out)


def _sees_only_what_it_may(world, situation: ContextSituation, out):
    """Change a token of one row."""
    if not out.size:
        return
    rng = np.random.default_rng([situation.seed, 11])
    row, column = int(rng.integers(situation.rows)), int(rng.integers(situation.length))
    shards = [told.shard for told in world.run(run_rank, situation.ranks, situation, (row, column))]
    moved = (unsharded(situation, shards).out != out).any(axis=(2, 3))              # [B, S]
    may = np.zeros_like(moved)
    may[row] = situation.seen()[row, :, column]
    wrong = np.argwhere(moved & ~may)
    require(not len(wrong), f"token {column} of row {row} is changed, and token {wrong[0][1] if len(wrong) else ''} of row "
                            f"{wrong[0][0] if len(wrong) else ''} moves, which may not see it, in {situation}")


def context_counts(world, situation: ContextSituation):
    """Messages and bytes that each rank sends, forward and backward, are what the formulas say."""
    cut = Cut(*(getattr(situation, name) for name in ("ranks", "way", "rows", "length", "heads", "kv_heads", "width")),
              np.dtype(situation.dtype).itemsize, situation.node, situation.moved)
    for rank, told in enumerate(world.run(run_rank, situation.ranks, situation)):
        for way, counted, promised in zip(("forward", "backward"), told.sent, context_volume(rank, cut)):
            require(counted == (promised.messages, promised.elements),
                    f"rank {rank} sends {counted} (messages, bytes) {way}, and the formula is "
                    f"{(promised.messages, promised.elements)}, in {situation}")
