"""The runner: obeys a pipeline schedule (law 11), whatever it is.

For each slot of its row a rank has posted the receives beforehand, since the slot before that receives; it computes, starts to send,
and waits for a send, which frees its buffer, only when the next of the same kind and stage is on its way: a schedule that was checked
(`refpar/schedules/check.py`) hangs on no wire.  Forward hands y [B, S, D] to the next stage, backward its gradient to the one before; a
stage on the same rank gets it in hand.  Tags name the op, so no order of messages between two ranks is presumed.

    F   down the stage: y, and what backward needs      B   up the stage: dx, and the products that W multiplies (law 1)
    W   the weight gradients of what B left             BW  both, an ordinary backward

A stage goes through the slices of a sequence in order, and hands `after` of one to the next as `before` (law 6); backward comes from
the other end.  Gradients of all micro-batches are added (law 3).
"""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.wire import TAGS
from refpar.nn.chain import Chain, backward, forward, gradients, start
from refpar.nn.gradient import zeros_like
from refpar.parallel.order import sliced, way_of
from refpar.parallel.stages import on_rank, stage, stage_layers


def pipelined(chain: Chain, schedule, mesh, mine, dtype, by_cost: bool = False):
    """(this rank's part of a whole chain, work): work(chain, params, batches, count) -> (summed loss, gradients) of a step, as
    `data.accumulate` has it for a model in one place; `batches` are the micro-batches of this rank's rows and columns, as many as the
    schedule has."""
    pp, parts = mesh.axis("pp"), stage_layers(chain, schedule.depth, by_cost)
    stages = {s: stage(chain, parts[s % len(parts)]) for s, place in enumerate(schedule.places) if place == pp.index}

    def work(_, params, batches, count):
        slices = [sliced(batch, schedule.slices, way_of(chain.model, mesh.layout), mesh.axis("cp")) for batch in batches]
        return Pipeline(schedule, stages, params, slices, count, pp, mine, dtype).run()
    return on_rank(chain, parts, schedule.places, pp.index), work


class Kept(NamedTuple):
    """What F leaves for B."""
    saved: Any
    after: Any
    loss: Any           # what the loss saved, on the last stage


class Pipeline:
    """One step of one rank: `run` gives (summed loss, gradients) of what this rank computed.

    stages: those of this rank's stages, number -> Chain.  batches: micro-batch -> slices of the sequence -> Batch, of this rank's rows
    and columns.  mine: those of a batch's tokens that the stream has here (`Seams.mine`).  dtype: the stream's.
    """

    def __init__(self, schedule, stages: dict[int, Chain], params: dict, batches, count: int, pp, mine, dtype):
        self.schedule, self.stages, self.params, self.batches = schedule, stages, params, batches
        self.scale, self.pp, self.mine, self.dtype = 1.0 / max(count, 1), pp, mine, dtype
        self.kept, self.products, self.posted, self.handed, self.sent = {}, {}, {}, {}, {}
        self.after, self.dbefore = {}, {}
        self.loss, self.grads = 0.0, {}

    def run(self):
        """Obey the schedule."""
        row = self.schedule.rows[self.pp.index]
        coming = (slot for slot in row if any(map(self.comes, slot)))
        self.expect(next(coming, ()))
        for slot in row:
            if any(map(self.comes, slot)):
                self.expect(next(coming, ()))
            taken = [(op, self.take(op)) for op in slot]
            for op, made in [(op, self.work(op, x)) for op, x in taken]:
                self.give(op, made)
        for request in self.sent.values():
            request.wait()
        for layer, group in self.params.items():                # a copy of the model that no micro-batch went through has zeros
            mine = self.grads.setdefault(layer, {})
            mine |= {name: np.zeros_like(w) for name, w in group.items() if name not in mine}
        watch.held("gradient", self.grads)
        return self.loss, self.grads

    # ---------------------------------------------------------------------------------------------------- messages

    def tag(self, op) -> int:
        """The name of an op's output, as a tag: B and F of a stage differ, slices and micro-batches too."""
        schedule = self.schedule
        place = (op.stage * schedule.micros + op.micro) * schedule.slices + op.slice
        return (2 * place + (op.kind != "F")) % TAGS

    def source(self, op):
        """The op whose output this one takes, or None."""
        giver = self.schedule.giver(op)
        return None if giver is None else op._replace(stage=giver, kind=op.kind[0])

    def comes(self, op) -> bool:
        """Does an op work on what another rank sends?"""
        source = self.source(op)
        return source is not None and self.schedule.places[source.stage] != self.pp.index

    def expect(self, slot):
        """Post the receives of a slot."""
        for op in filter(self.comes, slot):
            source = self.source(op)
            tokens = self.mine(self.batches[op.micro][op.slice]).tokens
            x = np.empty((*tokens.shape, self.stages[op.stage].model.width), self.dtype)
            self.posted[source] = x, self.pp.irecv(x, self.schedule.places[source.stage], self.tag(source))
            watch.held("received", [x for x, _ in self.posted.values()])

    def take(self, op):
        """What an op works on; None at the pipeline's ends."""
        source = self.source(op)
        if source in self.posted:
            x, request = self.posted.pop(source)
            request.wait()
            return x
        return self.handed.pop(source, None)

    def give(self, op, y):
        """Send an op's output to the stage that takes it, or keep it in hand; at most one send of a kind and stage stays open."""
        taker, made = self.schedule.taker(op), op._replace(kind=op.kind[0])
        if taker is None:
            return
        rank = self.schedule.places[taker]
        if rank == self.pp.index:
            self.handed[made] = y
            return
        request = self.pp.isend(np.ascontiguousarray(y), rank, self.tag(made))
        if made[:2] in self.sent:
            self.sent[made[:2]].wait()
        self.sent[made[:2]] = request

    # -------------------------------------------------------------------------------------------------------- work

    def work(self, op, x):
        """Do what an op says with what it took; what is returned goes to the stage that takes it."""
        return {"F": self.forward, "B": self.backward, "W": self.multiply, "BW": self.both}[op.kind](op, x)

    def forward(self, op, x):
        """F."""
        chain, batch, place = self.stages[op.stage], self.batches[op.micro][op.slice], op[1:]
        x = batch.tokens if self.schedule.giver(op) is None else x
        watch.op("F", 0)                            # for a clock that has a price for it; what is counted is told within
        before = start(chain, self.params, batch) if op.slice == 0 else self.after.pop(place[:2])
        y, after, saved = forward(chain, x, self.params, batch, before)
        self.after |= {place[:2]: after} if op.slice < self.schedule.slices - 1 else {}
        kept = None
        if self.schedule.taker(op) is None:
            (loss, _), kept = chain.loss.forward(y, batch.targets)
            self.loss += loss
        if self.schedule.backward:
            self.kept[place] = Kept(saved, after, kept)
        watch.held("saved", [(kept.saved, kept.loss) for kept in self.kept.values()])
        return y

    def backward(self, op, dy):
        """B."""
        chain, batch, place = self.stages[op.stage], self.batches[op.micro][op.slice], op[1:]
        kept = self.kept.pop(place)
        watch.value("batch", batch)
        dy = chain.loss.backward(self.scale, kept.loss) if self.schedule.giver(op) is None else dy
        watch.op("B", 0)
        dafter = zeros_like(kept.after) if op.slice == self.schedule.slices - 1 else self.dbefore.pop(place[:2])
        dx, dbefore, self.products[place] = backward(chain, dy, kept.saved, self.params, batch, dafter)
        self.dbefore |= {place[:2]: dbefore} if op.slice > 0 else {}
        watch.held("products", self.products)
        return dx

    def multiply(self, op, _=None):
        """W."""
        watch.op("W", 0)
        for layer, group in gradients(self.stages[op.stage], self.products.pop(op[1:])).items():
            mine = self.grads.setdefault(layer, {})
            for name, grad in group.items():
                mine[name] = mine[name] + grad if name in mine else grad

    def both(self, op, dy):
        """BW."""
        dx = self.backward(op, dy)
        self.multiply(op)
        return dx
