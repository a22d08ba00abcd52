"""A simulated network, to hold formulas of time against: one rank's clock, on the wire of any world.

A message of m bytes takes alpha + m beta.  A rank sends one message at a time and receives one at a time, both at once, and adds
nothing: so two that leave together leave one after the other.  What a rank does between messages takes no time.
"""
from collections import defaultdict, deque

import numpy as np

from refpar.comm.threads import ThreadWorld
from refpar.comm.wire import Wire


class ClockedWire(Wire):
    """A wire that keeps the time of its rank.  under_way: (source, to) -> times at which messages arrive, of all ranks."""

    def __init__(self, wire, alpha: float, beta: float, under_way):
        super().__init__(wire.rank, wire.size)
        self.wire, self.alpha, self.beta, self.under_way = wire, alpha, beta, under_way
        self.clock = self.free = 0.0            # now; when the last message has left

    def start(self, request):
        array, peer, tag = request.array, request.peer, request.tag
        if request.way == "recv":
            request.state = self.wire.irecv(array, peer, tag)
            return
        self.free = max(self.free, self.clock) + self.alpha + array.nbytes * self.beta
        self.under_way[self.rank, peer].append(self.free)
        request.state = self.wire.isend(array, peer, tag)

    def complete(self, request):
        request.state.wait()
        if request.way == "recv":
            self.clock = max(self.clock, self.under_way[request.peer, self.rank].popleft())


def seconds(program, ranks: int, alpha: float, beta: float) -> float:
    """How long program(wire) takes on such a network: when the last rank has done, and its last message has left."""
    under_way = defaultdict(deque)

    def clocked(wire):
        mine = ClockedWire(wire, alpha, beta, under_way)
        program(mine)
        return max(mine.clock, mine.free)
    return float(np.max(ThreadWorld().run(clocked, ranks)))
