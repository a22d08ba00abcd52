"""Context parallelism of what a conv and a scan remember: ranks hand on summaries of their tokens, never the tokens.

Each rank has one run of a row's tokens, in order.  What it must know of all the earlier ones is one summary (law 5: the last inputs
of a conv, decay and state of a scan), of one size for any number of tokens, so these messages do not grow with the sequence.  Three
fillings of the seam `carry`, which differ in who merges when; n bytes a summary, c ranks:

              messages of rank i                        bytes                       one after the other
    gather    c-1, all_gather (as a ring)               (c-1) n                     c-1      LASP-2 (Sun et al. 2025)
    chain     1, but for the last; and the broadcast    n, and the broadcast        c-1      LASP-1 (Sun et al. 2024)
    scan      ceil(log2(c-i)); and the broadcast        as many n                   log2 c   Hillis and Steele (1986)

where the broadcast, of the last rank's total to all, has c-1 messages of n bytes together: what lies behind the rows is the same on
all ranks, as what is `given` before them.  n of a conv's summary is 8 B + B (W-1) C e, of Mamba-2's scan B M (1 + P N) e, and of
Mamba-1's 2 B N I e, with e bytes a number; all fields of a summary travel in one message.

Backward asks what comes behind my tokens.  That is the same question on the axis turned round, so it is the same function.
"""
from __future__ import annotations

from functools import partial, reduce

import numpy as np

from refpar import watch
from refpar.comm.collectives import all_gather, broadcast
from refpar.comm.shards import slices
from refpar.nn.seams import Pair


def both_ways(carry, cp) -> Pair:
    """carry(cp, merge, own, given) -> here, on, for the ranks before me; and for those after me, who are before me from the end."""
    return Pair(partial(carry, cp), partial(carry, cp.among(reversed(range(cp.size)))))


def gather(cp) -> Pair:
    """Everybody gets all summaries, and merges them alike."""
    return both_ways(_gather, cp)


def chain(cp) -> Pair:
    """Each waits for what lies before it, and hands on the merge of that and its own."""
    return both_ways(_chain, cp)


def scan(cp) -> Pair:
    """After round k each has merged the 2**k ranks that end with it; any number of ranks will do."""
    return both_ways(_scan, cp)


def _gather(cp, merge, own, given):
    every = gathered(own, cp)
    here = reduce(merge, every[:cp.index], given)
    return here, reduce(merge, every[cp.index:], here)


def _chain(cp, merge, own, given):
    here = given
    with watch.calling(cp, "chain"):
        if cp.index > 0:
            here = received(own, cp, cp.index - 1)
        so_far = merge(here, own)
        if cp.index + 1 < cp.size:
            cp.send(packed(so_far), cp.index + 1)
        return here, of_the_last(so_far, cp)


def _scan(cp, merge, own, given):
    here, reach = given, 1
    so_far = merge(given, own) if cp.index == 0 else own
    with watch.calling(cp, "scan"):
        while reach < cp.size:
            leaving = [cp.isend(packed(so_far), cp.index + reach)] if cp.index + reach < cp.size else []
            if cp.index >= reach:
                earlier = received(own, cp, cp.index - reach)
                here = earlier if reach == 1 else merge(earlier, here)          # ranks beyond the first begin without `given`
                so_far = merge(earlier, so_far)
            for request in leaving:
                request.wait()
            reach *= 2
        return here, of_the_last(so_far, cp)


# --------------------------------------------------------------------------------------------------- a summary as a message

def packed(summary) -> np.ndarray:
    """All fields, one after the other, as bytes."""
    return np.concatenate([np.asarray(field, order="C").reshape(field.size).view(np.uint8) for field in summary])


def unpacked(message, like):
    """The summary in a message, no part of which holds on to the rest; `like` has the shapes and dtypes."""
    parts = slices([field.nbytes for field in like])
    return type(like)(*(message[part].view(field.dtype).reshape(field.shape).copy() for part, field in zip(parts, like)))


def received(like, cp, source: int):
    """The summary that comes from a rank."""
    message = np.empty(sum(field.nbytes for field in like), np.uint8)
    watch.held("received", message)
    cp.recv(message, source)
    return unpacked(message, like)


def gathered(own, cp) -> list:
    """Every rank's summary."""
    message = packed(own)
    every = all_gather(message, cp, 0, [message.size] * cp.size)
    return [unpacked(part, own) for part in every.reshape(cp.size, message.size)]


def of_the_last(summary, cp):
    """The last rank's summary, on all."""
    return unpacked(broadcast(packed(summary), cp, cp.size - 1), summary)


# The options of Mamba over cp that hand on summaries.
CARRIES = {"gather": gather, "chain": chain, "scan": scan}
