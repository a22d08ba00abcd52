"""The loss over a vocabulary that is cut over tp: logits are never gathered.

Each rank has the logits of some words, [B, S, V/tp].  What it needs of the others is three numbers a token (law 5's partial result of
`nn/loss.py`): the largest logit, the sum of exponentials below it, and the addend of the target's logit.

    all_reduce (maximum) of top [T]         then each rank moves its sum to the common top
    all_reduce (sum) of [2, T]              the two sums

Elements sent per rank, p ranks: 2 (p-1)/p times T, and times 2 T; against (p-1)/p T V for gathered logits.  Backward sends nothing:
p - q is each word's own.  The gradient of the last hidden states is Partial, an addend from each rank's words, and the head's
`enter` completes it.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3, "fuse the output ... with the cross entropy loss".
"""
from __future__ import annotations

import numpy as np

from refpar.comm.collectives import all_reduce
from refpar.config import Model
from refpar.nn import loss
from refpar.nn.ops import flat
from refpar.nn.seams import Pair


def merge_over(spread: loss.Spread, axis) -> loss.Spread:
    """`loss.merge` of all ranks' parts, on all ranks."""
    top = all_reduce(spread.top, axis, op=np.maximum)                               # [T]
    nothing = loss.Spread(top, np.zeros_like(top), np.zeros_like(top))
    mine = loss.merge(spread, nothing)                                              # my sums, below the common top
    both = all_reduce(np.stack([mine.total, mine.expected]), axis)                  # [2, T]
    return loss.Spread(top, *both)


def cross_entropy(config: Model, tp) -> Pair:
    """The chain's loss: forward(logits [B, S, V/tp], targets) -> (sum, count), saved; backward(scale, saved) -> dlogits.

    The sum and the count are Invariant over tp: every rank has the loss of all words.
    """
    first = config.part("V", tp.size, tp.index).start
    q, z = loss.target_of(config.vocab, config.smoothing), config.z_loss

    def forward(logits, targets):
        rows = targets.reshape(targets.size)
        spread = merge_over(loss.partial(loss.real(flat(logits), first, config.vocab), rows, first, q), tp)
        result, lse = loss.finish(spread, rows, z)
        return result, {"logits": logits, "lse": lse, "targets": targets}

    def backward(scale, saved):
        return loss.cross_entropy_backward(scale, saved, first, q, z, config.vocab)

    return Pair(forward, backward)
