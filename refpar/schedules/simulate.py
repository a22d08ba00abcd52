"""A schedule in time: when each step runs, if F, B and W take given times.

A step starts when its rank is free and all that its ops need is there: at the end of the op that made it, and a latency later where that
op ran on another rank.  A message takes nobody's time (it is sent by a copy engine), so that a send never holds up its rank.
Times may be whole numbers or Fractions, and then everything here is exact.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from refpar.parallel.schedule import Op, Schedule, Step


@dataclass(frozen=True)
class Costs:
    """Times of one op of each stage: a number for all stages, or one for each.  pair: of DualPipe's F with BW, if not their sum."""
    F: Any = 1
    B: Any = 1
    W: Any = 1
    latency: Any = 0
    pair: Any = None

    def op(self, op: Op):
        """The time that an op takes alone."""
        costs = [getattr(self, letter) for letter in op.kind]
        return sum(cost[op.stage] if isinstance(cost, (list, tuple)) else cost for cost in costs)

    def step(self, step: Step):
        """The time of a step."""
        return self.pair if len(step) > 1 and self.pair is not None else sum(map(self.op, step))


@dataclass(frozen=True)
class Timeline:
    """times: for each rank the (start, end) of each of its steps."""
    schedule: Schedule
    times: tuple[tuple[tuple, ...], ...]

    @property
    def makespan(self):
        """From the first start to the last end, over all ranks."""
        return max((row[-1][1] for row in self.times if row), default=0)

    @property
    def spans(self) -> list:
        """Each rank's time from its first start to its last end."""
        return [row[-1][1] - row[0][0] if row else 0 for row in self.times]

    @property
    def busy(self) -> list:
        """Each rank's time at work."""
        return [sum(end - start for start, end in row) for row in self.times]

    @property
    def idle(self) -> list:
        """What the longest span has above each rank's work."""
        return [max(self.spans) - busy for busy in self.busy]

    @property
    def bubble(self):
        """The time that is wasted: the longest idle."""
        return max(self.idle)

    @property
    def rate(self):
        """The bubble as a part of the longest span."""
        return self.bubble / max(self.spans)


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Run a checked schedule on given costs."""
    done: dict[Op, tuple[int, Any]] = {}                    # piece of work -> (rank, end)
    times: list[list[tuple]] = [[] for _ in schedule.rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while len(times[rank]) < len(row):
                step = row[len(times[rank])]
                needs = [need for op in step for need in schedule.needs(op)]
                if not all(need in done for need in needs):
                    break
                ready = [done[need][1] + costs.latency * (done[need][0] != rank) for need in needs]
                start = max([*ready, times[rank][-1][1] if times[rank] else 0])
                end = start + costs.step(step)
                times[rank].append((start, end))
                done |= {part: (rank, end) for op in step for part in op.parts}
                moved = True
    return Timeline(schedule, tuple(map(tuple, times)))
