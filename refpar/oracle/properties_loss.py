"""What is true of a loss over words that ranks share, of logits of any size.  A property raises one sentence, or returns."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar.comm.mesh import Axis
from refpar.nn import loss
from refpar.oracle.equal import distance
from refpar.oracle.freeze import lent
from refpar.oracle.properties_comm import require
from refpar.oracle.situation_loss import LossSituation
from refpar.parallel import vocabulary


class Told(NamedTuple):
    """What a rank knows afterwards: the summed loss, its targets, and the gradient of its words' logits."""
    loss: float
    count: int
    dlogits: np.ndarray         # [1, T, V/tp]


def run(pair, logits, targets) -> Told:
    """Down and up."""
    (total, count), saved = lent(pair.forward)(logits, targets)
    return Told(total, count, lent(pair.backward)(0.5, saved))


def run_rank(wire, situation: LossSituation) -> Told:
    """The program of one rank, which has the logits of its words."""
    tp, (logits, targets) = Axis("tp", tuple(range(wire.size)), wire.rank, wire), situation.drawn()
    mine = situation.model.part("V", tp.size, tp.index)
    return run(vocabulary.cross_entropy(situation.model, tp), np.ascontiguousarray(logits[..., mine]), targets)


def vocabulary_loss(world, situation: LossSituation):
    """Every rank has the loss of all words, and ranks together the gradient: those of the single process, finite where it is."""
    s, (logits, targets) = situation, situation.drawn()
    alone = run(loss.cross_entropy(s.words, s.smoothing, s.z_loss), logits, targets)
    told = world.run(run_rank, s.ranks, s)
    largest = float(np.max(np.abs(logits), initial=1.0))
    scale = largest + s.z_loss * (largest + np.log(s.words)) ** 2               # of one token's addends
    for rank, mine in enumerate(told):
        require(mine.count == alone.count, f"rank {rank} counts {mine.count} targets, and must count {alone.count}")
        require(distance(mine.loss, alone.loss, s.words + s.tokens, max(1, s.tokens) * scale) <= 1,
                f"on rank {rank} the loss is {mine.loss}, and must be {alone.loss}")
    apart = distance(np.concatenate([mine.dlogits for mine in told], axis=-1), alone.dlogits, s.words, 1 + scale)
    require(apart <= 1, f"the gradient of the logits is {apart:.3g} times the bound away from that of one process")
