"""Context parallelism of attention: every rank has some tokens of each row, and their queries need the keys of all.

Fillings of the seam `core` (`nn/attention.py`) that let keys and values travel; `parallel/ulysses.py` has those that cut heads instead,
and `refpar/contrast/pass_q.py` one that lets queries travel.  Each is `blocks.partial` over the keys of one rank after the other, and
`blocks.merge` of the results (law 5).  In backward the merged lse, and delta = rowsum(dout * out) of the merged out, make each rank's
keys an addend by itself.  Who sees whom is told by places alone: a rank knows its own from the batch, and those of any other from
`batch.whole` and the order `way`.

Elements sent by rank i, with T_j = B S_j 2KE of keys and values on rank j, T their sum, exactly:

              forward         backward                        a rank holds
    ring      T - T_(i+1)     (T - T_(i+1)) + (T - T_i)       the keys of two ranks
    gather    T - T_(i+1)     (T - T_(i+1)) + (T - T_i)       all keys

(For c ranks of one size, T/c each: (c-1)/c T forward.  `gather` where its collectives run as rings; other algorithms have other
neighbours and the same sum.  A ring of two levels sends as much, but on another way.)  Keys are sent again in backward rather than
kept: what is saved is the rank's shard.
Sources: Liu et al. 2023, "Ring Attention"; Brandon et al. 2023, "Striped Attention"; Grattafiori et al. 2024, "The Llama 3 herd of
models", section 3.3.2, for gather.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar.comm.collectives import all_gather, reduce_scatter
from refpar.nn import blocks
from refpar.nn.attention import EVERYTHING, Places, extend, places, share_out
from refpar.nn.blocks import Attended, finish, identity, merge
from refpar.nn.seams import Pair
from refpar.parallel.order import so_far, together
from refpar.parallel.travel import rings


class Here(NamedTuple):
    """Attention over the keys of one rank: what `blocks.partial` must be told beside queries, keys and values."""
    drop: Callable | None = None
    window: int = EVERYTHING
    plan: Callable = blocks.blocks

    def partial(self, q, k, v, queries, keys, step) -> Attended:
        """Attention of some queries over some keys."""
        return blocks.partial(q, k, v, queries, keys, self.drop, step, self.window, self.plan)

    def backward(self, dout, delta, lse, q, k, v, queries, keys, step):
        """Their shares of dq, dk and dv."""
        return blocks.partial_backward(dout, delta, lse, q, k, v, queries, keys, self.drop, step, self.window, self.plan)


def standing(way: str, ranks: int, group: int = 1) -> Callable:
    """batch, place -> the places of the tokens so far that a rank holds, slice after slice; or that `group` neighbours hold together,
    of so many ranks."""
    def stand(batch, place):
        held = [places(together(whole, way, ranks, [rank])) for rank in range(place * group, (place + 1) * group)
                for whole in so_far(batch)]
        return Places(*(np.concatenate(some, axis=1) for some in zip(*held)))
    return stand


def attend_forward(among: Pair, q, k, v, batch):
    """out of my queries over all ranks' keys, and saved: my shards alone.

    among: forward(q, k, v, batch) -> Attended, and backward(dout, delta, lse, q, k, v, batch) -> dq, dk, dv of my shards.
    """
    out, lse = among.forward(q, k, v, batch)
    return out, {"q": q, "k": k, "v": v, "out": out, "lse": lse}


def attend_backward(among: Pair, dout, saved: dict, batch):
    """dq, dk and dv."""
    delta = np.vecdot(dout, saved["out"])                                               # [B, S, H], of the merged result
    return among.backward(dout, delta, *(saved[name] for name in ("lse", "q", "k", "v")), batch)


def seam(among: Pair) -> Pair:
    """The filling of `core`.  What is handed on is this rank's own keys: those of all slices so far travel together."""
    def forward(q, k, v, batch, before):
        after = extend(before, k, v, batch)
        out, saved = attend_forward(among, q, after["k"], after["v"], batch)
        return out, after, saved

    def backward(dout, dafter, saved, batch):
        dq, dk, dv = attend_backward(among, dout, saved, batch)
        return dq, *share_out(dk, dv, dafter, dq.shape[1])

    return Pair(forward, backward)


def ring(cp, way: str, drop=None, window: int = EVERYTHING, plan=blocks.blocks) -> Pair:
    """Keys and values travel, queries stay.  Backward: they travel again, and their gradients follow them home."""
    return seam(ring_among(cp, standing(way, cp.size), Here(drop, window, plan)))


def ring_among(axis, stand: Callable, here: Here) -> Pair:
    """The ring of an axis whose rank j holds the tokens `stand(batch, j)`, as `attend_forward` takes it."""
    circle = rings(axis)

    def shapes(k, batch):
        """Of the keys and values of each rank, [2, B, S_j, K, E]."""
        rows, _, *heads = k.shape
        return [(2, rows, stand(batch, rank).position.shape[1], *heads) for rank in range(axis.size)]

    def attend(q, k, v, batch):
        attended = identity(q)
        for owner, (k_j, v_j) in circle.travel(np.stack([k, v]), shapes(k, batch)):
            attended = merge(attended, here.partial(q, k_j, v_j, places(batch), stand(batch, owner), batch.step))
        return Attended(finish(attended), attended.lse)

    def grads(dout, delta, lse, q, k, v, batch):
        dq = np.zeros_like(q)

        def visit(owner, keys):
            share, *dkeys = here.backward(dout, delta, lse, q, *keys, places(batch), stand(batch, owner), batch.step)
            np.add(dq, share, out=dq)
            return np.stack(dkeys)                                                      # [2, B, S_j, K, E]
        lengths = shapes(k, batch)
        return dq, *circle.round_trip(np.stack([k, v]), lengths, visit, lengths)

    return Pair(attend, grads)


def gather(cp, way: str, drop=None, window: int = EVERYTHING, plan=blocks.blocks) -> Pair:
    """All keys and values on every rank, by one all_gather; backward gathers them again, and reduce_scatters their gradients."""
    stand, here = standing(way, cp.size, cp.size), Here(drop, window, plan)

    def sizes(batch):
        """How many tokens each rank holds."""
        return [standing(way, cp.size)(batch, rank).position.shape[1] for rank in range(cp.size)]

    def attend(q, k, v, batch):
        keys = all_gather(np.stack([k, v]), cp, dim=2, sizes=sizes(batch))              # [2, B, S, K, E]
        return here.partial(q, *keys, places(batch), stand(batch, 0), batch.step)

    def grads(dout, delta, lse, q, k, v, batch):
        keys = all_gather(np.stack([k, v]), cp, dim=2, sizes=sizes(batch))
        dq, *dkeys = here.backward(dout, delta, lse, q, *keys, places(batch), stand(batch, 0), batch.step)
        return dq, *reduce_scatter(np.stack(dkeys), cp, dim=2, sizes=sizes(batch))

    return seam(Pair(attend, grads))
