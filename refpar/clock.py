"""Virtual time: how long a program would take on another machine, measured on the program itself.

On threads every rank has a clock.  Arithmetic moves it on by what each op costs, the wait for a message to when the message is
there, and nothing else does.  So a makespan, the waits in it, and what a posted message hid behind arithmetic are numbers of the
real program; they are the same on each run, and exact where costs are given as integers or fractions.

A rank sends one message after another, and computes and receives meanwhile.  A message of n bytes occupies its sender's port for
alpha + n beta and arrives `latency` later; where it is longer than the eager limit, it does not leave before its receive is posted.
A send that need not wait costs its rank nothing.  (Many messages of one rank share their latencies, and each has its own alpha,
which is that of `refpar/plan/alpha_beta.py`.)

    world = ClockWorld(everywhere(Link(alpha=Fraction(1, 10**6), beta=Fraction(1, 10**9))), peak(10**12))
    world.run(program, 4)
    print(world.makespan, world.clocks[0].waited)
    print(chart(world.events))              # write(path, world.events): the same for Perfetto

Among the ranks that are ready the one runs whose clock is earliest, so messages are posted in the order of virtual time; a seed
draws only among those whose clocks are equal.

Source: the ports are those of LogGP (Alexandrov et al., 1995), alpha its gap, beta its gap a byte, without its overhead.
"""
from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Callable, NamedTuple

from refpar import watch
from refpar.comm.threads import Baton, ThreadWorld
from refpar.trace import Trace


class Flight(NamedTuple):
    """One message's times: its first byte leaves, the port is free again, all has arrived."""
    begin: Any
    sent: Any
    arrival: Any


@dataclass(frozen=True)
class Link:
    """What a message costs, in seconds: alpha + bytes * beta of its sender's port, and `latency` on its way.

    A rank has one port for all links that cost alike.
    """
    alpha: Any = 0
    beta: Any = 0
    latency: Any = 0

    def __post_init__(self):
        if min(self.alpha, self.beta, self.latency) < 0:
            raise ValueError(f"a link costs nothing or more, not {self}")

    def flight(self, begin, nbytes: int) -> Flight:
        """Of a message that leaves at `begin`."""
        sent = begin + self.alpha + nbytes * self.beta
        return Flight(begin, sent, sent + self.latency)


# Which link a message takes: links(source, to, axis) -> Link.  Ranks are the world's; axis is None outside every mesh axis.

def everywhere(link: Link) -> Callable:
    """All links are alike."""
    return lambda source, to, axis: link


def by_axis(links: dict[str, Link], other: Link) -> Callable:
    """Each mesh axis has its own."""
    return lambda source, to, axis: links.get(axis, other)


def by_pair(links: dict[tuple[int, int], Link], other: Link) -> Callable:
    """(source, to) -> its own link."""
    return lambda source, to, axis: links.get((source, to), other)


def by_node(node: int, inside: Link, across: Link) -> Callable:
    """Nodes of `node` ranks in a row: one link inside, another across."""
    return lambda source, to, axis: inside if source // node == to // node else across


# What an op costs: seconds(rank, name, flops) -> seconds.

def peak(speed, others: dict | None = None) -> Callable:
    """Counted FLOPs over the speed, in FLOPs a second.  others: rank -> its speed, where it is another."""
    speeds = others or {}
    if min([speed, *speeds.values()]) <= 0:
        raise ValueError(f"a peak is more than 0 FLOPs a second, not {speed} {others or ''}")
    return lambda rank, name, flops: Fraction(flops) / speeds.get(rank, speed)


def given(costs: dict) -> Callable:
    """Seconds of an op by its name, such as {"F": 1, "B": 2}; what is not named costs nothing."""
    return lambda rank, name, flops: costs.get(name, 0)


class Clock(Trace):
    """One rank's clock, and what it has seen, for `trace.chart` and `trace.write`: layers, collectives, messages, ops and waits.

    now         seconds since the run began: busy + waited
    travelled   seconds that received messages were under way, each counted alone
    exposed     those of them for which this rank waited: the others were hidden.  All other waiting was for messages that had not
                left yet.
    """

    def __init__(self, rank: int, seconds: Callable):
        self.now = self.busy = self.waited = self.travelled = self.exposed = 0
        super().__init__(rank, lambda: self.now)
        self.seconds = seconds
        self.ports = {}                         # link -> when the last message on it has left

    def op(self, name, flops):
        spent = self.seconds(self.rank, name, flops)
        self.busy += spent
        self._go_on(spent, name, "op", flops=flops)

    def depart(self, link: Link, nbytes: int):
        """When a message leaves that is posted now."""
        begin = max(self.now, self.ports.get(link, 0))
        self.ports[link] = link.flight(begin, nbytes).sent
        return begin

    def wait(self, request, flight: Flight):
        """The rank has come to its wait for a request, whose message has these times."""
        end = flight.sent if request.way == "send" else flight.arrival
        if request.way == "recv":
            self.travelled += end - flight.begin
            self.exposed += max(0, end - max(self.now, flight.begin))
        spent = max(0, end - self.now)
        self.waited += spent
        self._go_on(spent, f"wait for {request}", "wait", axis=request.errand.axis, operation=request.errand.operation)

    def _go_on(self, spent, name, kind, **args):
        """Time passes; what takes none leaves no trace."""
        if spent > 0:
            self.events.append({"name": name, "cat": kind, "ph": "X", "ts": self.now, "dur": spent, "pid": 0, "tid": self.rank,
                                "args": args})
            self.now += spent


class ClockWorld(ThreadWorld):
    """The threaded world in virtual time.  links and seconds: see above.  After a run, or in the middle of one that failed:

    clocks      one a rank
    """

    def __init__(self, links: Callable = everywhere(Link()), seconds: Callable = given({}), seed: int | None = None,
                 eager: int = 65536):
        super().__init__(seed, eager)
        self.links, self.seconds, self.clocks = links, seconds, []

    def baton(self, size, choose):
        self.clocks = [Clock(rank, self.seconds) for rank in range(size)]
        return ClockBaton(self.clocks, self.links, self.eager, choose)

    def run(self, program, size, *args):
        def watched(wire, *args):
            with watch.watching(wire.baton.clocks[wire.rank]):
                return program(wire, *args)
        return super().run(watched, size, *args)

    @property
    def makespan(self):
        """Seconds until the last rank has returned."""
        return max(clock.now for clock in self.clocks)

    @property
    def events(self) -> list[dict]:
        """Of all ranks; times in seconds."""
        return [event for clock in self.clocks for event in clock.events]


class ClockBaton(Baton):
    """Hands each turn to the rank whose clock is earliest, and tells the clocks of messages."""

    def __init__(self, clocks, links, eager, choose):
        super().__init__(len(clocks), eager, self._earliest, restless=True)
        self.clocks, self.links, self.draw = clocks, links, choose
        self.times = {}         # a request -> (its link, when it leaves), or when the receive was posted; until it is met
        self.flights = {}       # then, what its wait waits for

    def _earliest(self, ready):
        first = min(self.clocks[rank].now for rank in ready)
        return self.draw([rank for rank in ready if self.clocks[rank].now == first])

    def post(self, way, letter=None, receive=None):
        source, to, _ = way
        if letter:
            link = self.links(source, to, letter.request.errand.axis)
            self.times[letter.request] = link, self.clocks[source].depart(link, letter.request.array.nbytes)
        else:
            self.times[receive] = self.clocks[to].now
        super().post(way, letter, receive)

    def meet(self, letter, receive):
        send, posted = letter.request, self.times.pop(receive)
        nbytes, (link, begin) = send.array.nbytes, self.times.pop(send)
        if nbytes > self.eager:                                             # a rendezvous
            self.flights[send] = self.flights[receive] = link.flight(max(begin, posted), nbytes)
        else:
            self.flights[receive] = link.flight(begin, nbytes)
        for request in (send, receive):
            if self.waiting.get(request.wire.rank) is request:              # it will go on at that time, so its clock says so now
                self.waited(request)
        super().meet(letter, receive)

    def waited(self, request):
        if request in self.flights:
            self.clocks[request.wire.rank].wait(request, self.flights.pop(request))
