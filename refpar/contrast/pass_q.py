"""Ring attention that moves queries and leaves keys and values where they are (pass-Q).

Elements sent by rank i, with Q_j = B S_j H of heads on rank j, Q their sum, exactly:

    forward     (Q - Q_(i+1)) E + (Q - Q_i) (E+1)           backward    (Q - Q_(i+1)) (2E+2) + (Q - Q_i) E

Queries are less than keys and values where few new tokens meet many old keys, or H < 2K.
Source: Yang et al. 2024, "Context parallelism for scalable million-token inference".
"""
from __future__ import annotations

import numpy as np

from refpar.nn import blocks
from refpar.nn.attention import EVERYTHING, places
from refpar.nn.blocks import Attended, merge
from refpar.nn.seams import Pair
from refpar.parallel.context import Here, seam, standing
from refpar.parallel.travel import rings


def ring_q(cp, way: str, drop=None, window: int = EVERYTHING, plan=blocks.blocks) -> Pair:
    """Queries travel, keys and values stay; (out, lse) over each rank's keys are merged on the way home.

    Backward: q, dout, lse and delta travel, dq comes home, and dk and dv are made where they belong.
    """
    circle, stand, here = rings(cp), standing(way, cp.size), Here(drop, window, plan)

    def shapes(q, width, batch):
        """Of what travels for each rank's queries, [B, S_j, H, width]."""
        return [(len(q), stand(batch, rank).position.shape[1], q.shape[2], width) for rank in range(cp.size)]

    def attend(q, k, v, batch):
        def visit(owner, q_j):
            return _pack(*here.partial(q_j, k, v, stand(batch, owner), places(batch), batch.step))

        def join(a, b):
            return _pack(*merge(_attended(a), _attended(b)))
        width = q.shape[3]
        return _attended(circle.round_trip(q, shapes(q, width, batch), visit, shapes(q, width + 1, batch), join))

    def grads(dout, delta, lse, q, k, v, batch):
        dk, dv, width = np.zeros_like(k), np.zeros_like(v), q.shape[3]

        def visit(owner, told):
            q_j, dout_j, rest = np.split(told, [width, 2 * width], axis=3)
            share, *dkeys = here.backward(dout_j, rest[..., 1], rest[..., 0], q_j, k, v, stand(batch, owner), places(batch),
                                          batch.step)
            for total, dkey in zip((dk, dv), dkeys):
                np.add(total, dkey, out=total)
            return share
        told = np.concatenate([q, dout, lse[..., None], delta[..., None]], axis=3)      # [B, S, H, 2E+2]
        dq = circle.round_trip(told, shapes(q, 2 * width + 2, batch), visit, shapes(q, width, batch))
        return dq, dk, dv

    return seam(Pair(attend, grads))


def _pack(out, lse):
    """One array to send, [B, S, H, E+1]."""
    return np.concatenate([out, lse[..., None]], axis=3)


def _attended(packed) -> Attended:
    """The inverse."""
    width = packed.shape[3] - 1
    return Attended(np.ascontiguousarray(packed[..., :width]), np.ascontiguousarray(packed[..., width]))
