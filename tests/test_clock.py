"""Virtual time: exact, repeatable, and equal to the formulas, on programs that know nothing of it."""
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refpar import clock, watch
from refpar.algorithms import ALGORITHMS
from refpar.clock import ClockWorld, Link, by_axis, by_node, by_pair, everywhere, peak
from refpar.comm import collectives
from refpar.comm.mesh import Axis, Mesh
from refpar.comm.threads import ThreadWorld
from refpar.sanitizer.endings import Deadlock
from refpar.config import PRESETS, Layout
from refpar.nn.ops import linear_forward
from refpar.oracle.run import run_sharded
from refpar.oracle.situation import Situation
from refpar.plan.alpha_beta import cost
from refpar.trace import chart, in_microseconds, write

ALPHA, BETA = Fraction(1, 7), Fraction(1, 1000)
LINK = Link(ALPHA, BETA)
times = st.fractions(0, 4, max_denominator=12)
seeds = st.one_of(st.none(), st.integers(0, 1000))


def makespan(program, size, *args, links=everywhere(LINK), **options):
    """Of program(wire, *args)."""
    world = ClockWorld(links, **options)
    world.run(program, size, *args)
    return world.makespan


def collective(wire, operation, name, elements):
    """One collective of bytes: `elements` of the whole array, in even parts."""
    axis, x, name = Axis.world(wire), np.zeros(elements, np.uint8), ALGORITHMS[operation][name]
    if operation == "all_gather":
        part = elements // wire.size
        return collectives.all_gather(x[:part], axis, 0, [part] * wire.size, algorithm=name)
    return getattr(collectives, operation)(x, axis, algorithm=name)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter"])
@given(st.integers(1, 7), st.sampled_from([0, 1, 30, 20_000]), st.sampled_from([0, 100, 65536]), seeds)
@example(5, 20_000, 0, 3)
def test_rings_take_what_the_formulas_say(operation, p, part, eager, seed):
    n = p * part
    rounds = 2 if operation == "all_reduce" else 1
    found = makespan(collective, p, operation, "ring", n, eager=eager, seed=seed)
    assert found == rounds * ((p - 1) * ALPHA + (p - 1) * part * BETA)
    factors = cost(operation, "ring", p)
    assert factors.messages == rounds * (p - 1) and np.isclose(factors.passes * n, rounds * (p - 1) * part)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("operation, name", [("all_reduce", "doubling"), ("all_reduce", "rabenseifner"), ("all_gather", "doubling"),
                                             ("reduce_scatter", "halving")])
def test_doublings_take_what_the_formulas_say(p, operation, name):
    factors = cost(operation, name, p)
    assert makespan(collective, p, operation, name, 640) == factors.messages * ALPHA + Fraction(factors.passes) * 640 * BETA


def ping_pong(wire, rounds, nbytes):
    ball = np.zeros(nbytes, np.uint8)
    for turn in range(rounds):
        if wire.rank == turn % 2:
            wire.send(ball, 1 - wire.rank)
        else:
            wire.recv(ball, 1 - wire.rank)


@given(st.integers(0, 6), st.integers(0, 50), times, times, times, seeds)
def test_ping_pong(rounds, nbytes, alpha, beta, latency, seed):
    links = everywhere(Link(alpha, beta, latency))
    assert makespan(ping_pong, 2, rounds, nbytes, links=links, seed=seed) == rounds * (alpha + nbytes * beta + latency)


def many(wire, count):
    """`count` messages of 10 bytes at once."""
    arrays = np.zeros((count, 10), np.uint8)
    requests = [wire.isend(array, 1) if wire.rank == 0 else wire.irecv(array, 0) for array in arrays]
    for request in reversed(requests):
        request.wait()


def test_a_port_sends_one_message_after_another_and_latencies_overlap():
    assert makespan(many, 2, 4, links=everywhere(Link(ALPHA, BETA, latency=5))) == 4 * (ALPHA + 10 * BETA) + 5


# One forward, one backward (1F1B), by hand.

def one_f_one_b(wire, m):
    """m micro-batches through wire.size stages: p-1-rank forwards first, then one forward and one backward in turn."""
    p, rank, sends = wire.size, wire.rank, []

    def step(kind, source, to):
        if 0 <= source < p:
            wire.recv(np.empty(0), source, tag=kind == "B")
        watch.op(kind, 0)
        if 0 <= to < p:
            sends.append(wire.isend(np.empty(0), to, tag=kind == "B"))
    warm = min(p - 1 - rank, m)
    for kind in ["F"] * warm + ["F", "B"] * (m - warm) + ["B"] * warm:
        step(kind, *((rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)))
    for send in sends:
        send.wait()


@given(st.integers(1, 6), st.integers(1, 12), times, times, seeds)
def test_a_pipeline_without_latency(p, m, f, b, seed):
    world = ClockWorld(seconds=clock.given({"F": f, "B": b}), seed=seed)
    world.run(one_f_one_b, p, m)
    assert world.makespan == (m + p - 1) * (f + b)
    assert [one.busy for one in world.clocks] == [m * (f + b)] * p


@given(st.integers(1, 6), st.integers(1, 12), times, seeds)
def test_a_pipeline_with_latency(p, m, latency, seed):
    """The longest way leads down with the first micro-batch and up with the last; between, it goes up and down as often as it can.
    To the stage d above the last and back it takes 2d latencies and d+1 micro-batches, for that stage is d ahead: of m-1, one in p
    is lost."""
    links, seconds = everywhere(Link(latency=latency)), clock.given({"F": 1, "B": 2})
    found = makespan(one_f_one_b, p, m, links=links, seconds=seconds, seed=seed)
    assert found == (m + p - 1) * 3 + 2 * latency * ((p - 1) + (m - 1) - -(-(m - 1) // p))


def test_a_chart_of_a_pipeline():
    world = ClockWorld(seconds=clock.given({"F": 1, "B": 2}))
    world.run(one_f_one_b, 3, 4)
    assert chart(world.events, unit=1) == ("   0 |FFF....BBFBB.BB.BB|\n"
                                           "   1 |.FF..BBFBBFBB.BB  |\n"
                                           "   2 |..FBBFBBFBBFBB    |")
    assert [len(line) for line in chart(world.events).split("\n")] == [107, 107, 107] and chart([]) == ""


def test_a_chart_shows_what_is_innermost():
    def span(name, kind, begun, dur):
        return {"name": name, "cat": kind, "ph": "X", "ts": begun, "dur": dur, "pid": 0, "tid": 1}
    spans = [span("1.attention", "layer", 10.0, 8.0), span("linear", "op", 12.0, 2.0),
             span("all_reduce on tp", "communication", 15.0, 2.0),
             {"name": "send 8 bytes", "cat": "message", "ph": "i", "ts": 11.0, "pid": 0, "tid": 0}]
    assert chart(spans, 1) == chart(spans[::-1], 1) == "   0 |        |\n   1 |aalla..a|"


# Overlap.

def overlapped(wire, early):
    """Rank 1 works 3 seconds, and receives what rank 0 has sent at once: it posts the receive before, or after."""
    if wire.rank == 0:
        return wire.send(np.zeros(10, np.uint8), 1)
    out = np.empty(10, np.uint8)
    request = wire.irecv(out, 0) if early else None
    watch.op("work", 0)
    (request or wire.irecv(out, 0)).wait()


@pytest.mark.parametrize("eager, early, waited, exposed", [(10, True, 0, 0), (10, False, 0, 0), (9, True, 0, 0), (9, False, 2, 2)])
def test_a_posted_receive_hides_its_message_behind_work(eager, early, waited, exposed):
    """A message beyond the eager limit sets out when its receive is posted, and its sender waits for that."""
    world = ClockWorld(everywhere(Link(alpha=Fraction(1, 2), beta=Fraction(1, 10), latency=Fraction(1, 2))),
                       clock.given({"work": 3}), eager=eager)
    world.run(overlapped, 2, early)
    sender, receiver = world.clocks
    assert (receiver.now, receiver.waited, receiver.exposed, receiver.travelled) == (3 + waited, waited, exposed, 2)
    assert sender.now == (0 if eager == 10 else Fraction(3, 2) if early else 3 + Fraction(3, 2))       # latency is the receiver's


def test_what_was_not_under_way_is_no_exposed_message():
    """A rank that waits for one that still works waits for it, not for the network."""
    def late(wire):
        if wire.rank == 0:
            watch.op("work", 0)
            return wire.send(np.zeros(10, np.uint8), 1)
        wire.recv(np.empty(10, np.uint8), 0)
    world = ClockWorld(everywhere(Link(beta=1)), clock.given({"work": 3}))
    world.run(late, 2)
    assert (world.clocks[1].waited, world.clocks[1].exposed) == (13, 10)


# Machines.

def product(wire):
    """A product of 2*3*4*5 FLOPs on each rank, and then a meeting of all."""
    linear_forward(np.ones((3, 4)), np.ones((4, 5)))
    collectives.all_reduce(np.zeros(0), Axis.world(wire), algorithm="ring")


def test_a_straggler_shows():
    world = ClockWorld(seconds=peak(10, {2: Fraction(10, 3)}))
    world.run(product, 4)
    assert [one.busy for one in world.clocks] == [12, 12, 36, 12] and [one.waited for one in world.clocks] == [24, 24, 0, 24]
    assert [line[6:22] for line in chart(world.events, 4).split("\n")] == ["lll......|", "lll......|", "lllllllll|", "lll......|"]


def test_links_by_axis_by_pair_and_by_node():
    fast, slow = Link(beta=1), Link(beta=10)

    def program(wire, axis, node):
        mesh = Mesh(Layout(dp=2, tp=2), wire, node)
        collectives.all_reduce(np.zeros(8, np.uint8), mesh.axis(axis), algorithm="ring")
    for links, tp, dp in [(by_axis({"tp": fast}, slow), 8, 80), (by_node(2, fast, slow), 8, 80), (by_node(4, fast, slow), 8, 8),
                          (by_pair({(0, 1): slow}, fast), 80, 8), (by_pair({(0, 1): slow, (2, 0): slow}, fast), 80, 80)]:
        assert (makespan(program, 4, "tp", 2, links=links), makespan(program, 4, "dp", 2, links=links)) == (tp, dp)


def test_a_link_has_two_directions():
    def one_way(wire):
        if wire.rank == 0:
            return wire.send(np.zeros(8, np.uint8), 1)
        wire.recv(np.empty(8, np.uint8), 0)
    links = by_pair({(0, 1): Link(beta=1)}, Link(beta=10))
    assert makespan(one_way, 2, links=links) == 8 and makespan(ping_pong, 2, 2, 8, links=links) == 88


def test_a_hierarchy_uses_fast_links_more():
    def program(wire, name):
        collectives.all_reduce(np.zeros(64, np.uint8), Mesh(Layout(dp=8), wire, 4).axis("dp"), algorithm=name)
    links = by_node(4, Link(beta=1), Link(beta=10))
    assert makespan(program, 8, ALGORITHMS["all_reduce"]["hierarchical"], links=links) == 2 * 3 * 16 + 2 * 1 * 80
    assert makespan(program, 8, "ring", links=links) == 2 * 7 * 80


@pytest.mark.parametrize("wrong", [lambda: Link(latency=-1), lambda: peak(0), lambda: peak(1, {2: -1})])
def test_what_no_machine_is(wrong):
    with pytest.raises(ValueError, match="costs nothing or more|more than 0 FLOPs a second"):
        wrong()


# The clock changes nothing, and sees all.

SITUATION = Situation(PRESETS["llama-tiny"], Layout(dp=3), documents=(64,))


def counted(wire):
    """A training run, its results and its FLOPs."""
    with watch.watching(watch.Ledger()) as ledger:
        return run_sharded(wire, SITUATION).digests, sum(ledger.flops.values())


def test_a_run_in_virtual_time_is_the_same_run(tmp_path):
    usual = ThreadWorld().run(counted, 3)
    seen = []
    for seed in (None, 1, 2):
        world = ClockWorld(everywhere(LINK), peak(10**9), seed=seed)
        assert world.run(counted, 3) == usual
        seen.append([(one.now, one.busy, one.waited, one.travelled, one.exposed, one.events) for one in world.clocks])
    assert seen[0] == seen[1] == seen[2]
    for one, (_, flops) in zip(world.clocks, usual):
        assert one.now == one.busy + one.waited and one.busy == Fraction(flops, 10**9) > 0
    write(tmp_path / "trace.json", world.events)
    told = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert told == in_microseconds(world.events)
    assert all(event["dur"] > 0 for event in world.events if event["cat"] in ("op", "wait"))
    assert {event["cat"] for event in told} == {"op", "wait", "layer", "communication", "message"}


def test_messages_are_posted_in_the_order_of_virtual_time():
    """Even where the ranks were made in another order, and one has far more messages than another."""
    seen = []

    def program(wire):
        for turn in range(3 * (wire.rank + 1)):
            watch.op(f"work {wire.rank}", 0)
            request = wire.irecv(np.empty(1), wire.rank)
            seen.append(wire.baton.clocks[wire.rank].now)
            wire.send(np.zeros(1), wire.rank)
            request.wait()
    ClockWorld(seconds=clock.given({"work 0": 5, "work 1": 3, "work 2": 1})).run(program, 3)
    assert seen == sorted(seen) and len(seen) == 18


def test_a_rank_that_waits_goes_on_when_its_message_arrives():
    """Not when it was met: the others, whose clocks are earlier, go first."""
    seen = []

    def program(wire):
        if wire.rank == 0:
            wire.recv(np.empty(1), 1)
            seen.append(wire.baton.clocks[0].now)
            return
        sends = [wire.isend(np.zeros(1), 0)]
        for _ in range(4):
            watch.op("work", 0)
            sends += [wire.irecv(np.empty(0), 1), wire.isend(np.zeros(0), 1)]
            seen.append(wire.baton.clocks[1].now)
        for send in sends:
            send.wait()
    ClockWorld(by_pair({(1, 0): Link(latency=Fraction(5, 2))}, Link()), clock.given({"work": 1})).run(program, 2)
    assert seen == [1, 2, Fraction(5, 2), 3, 4]


def test_a_deadlock_is_still_one():
    def all_wait(wire):
        watch.op("work", 0)
        wire.recv(np.empty(2), (wire.rank + 1) % 3)
    world = ClockWorld(everywhere(LINK), clock.given({"work": 1}))
    with pytest.raises(Deadlock, match=r"0 waits in recv\(16 bytes, tag 0\) from rank 1  \(test_clock.py(.|\n)*0 -> 1 -> 2 -> 0"):
        world.run(all_wait, 3)
    assert world.makespan == 1


def test_a_run_leaves_nothing_behind():
    batons = []

    def program(wire):
        batons.append(wire.baton)
        collective(wire, "all_reduce", "ring", 60)
    for eager in (0, 100):
        ClockWorld(everywhere(LINK), eager=eager).run(program, 3)
    assert not any(baton.times or baton.flights for baton in batons)
