"""The formulas of time: beside virtual time, and beside each other."""
import math

import numpy as np
import pytest

from refpar.algorithms import ALGORITHMS
from refpar.clock import ClockWorld, Link, everywhere
from refpar.comm import collectives
from refpar.comm.mesh import Axis, Mesh
from refpar.config import Layout
from refpar.plan import alpha_beta, promise
from refpar.plan.alpha_beta import Cost, best_segments, cost, crossover

ALPHA, BETA = 1.0, 2.0**-10
TIMED = [(operation, name) for operation, known in ALGORITHMS.items() if operation != "exchange"
         for name in known if name != "hierarchical"]
PIPELINES = {"chain", "double-tree"}
ROUGH = {("reduce", "double-tree"), ("all_reduce", "double-tree")}      # on the clock a rank can receive from two at once


def seconds(program, ranks: int) -> float:
    """How long program(wire) takes in virtual time; messages of any length need not wait for their receive."""
    world = ClockWorld(everywhere(Link(ALPHA, BETA)), eager=2**31)
    world.run(program, ranks)
    return world.makespan


def calls(operation: str, name: str, p: int, count: int, segments: int):
    """The program of one rank: an operation on `count` bytes."""
    def program(wire):
        axis, x = Axis.world(wire), np.zeros((count // p, p), np.uint8)
        how = {"algorithm": ALGORITHMS[operation][name]}
        if name in PIPELINES:
            how["segment"] = count // segments
        if operation == "all_gather":
            return collectives.all_gather(x[:count // p // p], axis, 0, [count // p // p] * p, **how)
        if operation == "all_to_all":
            return collectives.all_to_all(x.reshape(count, 1), axis, 0, None, 1, [1] * p, **how)
        return getattr(collectives, operation)(x, axis, **how)
    return program


@pytest.mark.parametrize("operation, name", TIMED)
@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [64, 2**16])
def test_times_are_those_of_the_clock(operation, name, p, count):
    """To the last digit, for even parts on 2**k ranks; those of two trees upwards are a bound that is nearly reached."""
    segments = 8
    told = cost(operation, name, p, segments).seconds(count, ALPHA, BETA)
    found = seconds(calls(operation, name, p, count, segments), p)
    if (operation, name) in ROUGH:
        assert 0.7 * told <= found <= told * (1 + 1e-12)
    else:
        assert math.isclose(found, told)


@pytest.mark.parametrize("node, nodes", [(2, 4), (4, 2), (2, 3), (1, 4), (4, 1)])
def test_the_time_of_a_hierarchy_is_the_sum_of_its_levels(node, nodes):
    """With one alpha and beta for all links."""
    p, count = node * nodes, 24 * 64

    def program(wire):
        axis = Mesh(Layout(dp=p), wire, node).axis("dp")
        collectives.all_reduce(np.zeros(count, np.uint8), axis, algorithm=ALGORITHMS["all_reduce"]["hierarchical"])
    inside, across = alpha_beta.hierarchical(node, nodes)
    assert math.isclose(seconds(program, p), (inside + across).seconds(count, ALPHA, BETA))


@pytest.mark.parametrize("p", [4, 8, 64, 1024])
def test_where_a_ring_overtakes_a_tree(p):
    lg, alpha, bandwidth = math.log2(p), 5e-6, 1e9
    n = crossover(cost("all_reduce", "tree", p), cost("all_reduce", "ring", p), alpha, 1 / bandwidth)
    assert math.isclose(n, alpha * bandwidth * (p - 1 - lg) / (lg - (p - 1) / p))
    tree, ring = (cost("all_reduce", name, p) for name in ("tree", "ring"))
    assert ring.seconds(0.9 * n, alpha, 1 / bandwidth) > tree.seconds(0.9 * n, alpha, 1 / bandwidth)
    assert ring.seconds(1.1 * n, alpha, 1 / bandwidth) < tree.seconds(1.1 * n, alpha, 1 / bandwidth)


def test_the_best_segments():
    n, steps = 2**20, 6
    k = best_segments(n, steps, ALPHA, BETA)
    times = {factor: (steps + factor * k) * (ALPHA + n / (factor * k) * BETA) for factor in (0.8, 1, 1.25)}
    assert times[1] < min(times[0.8], times[1.25])


def test_every_algorithm_has_its_formulas():
    assert {operation: set(known) for operation, known in ALGORITHMS.items()} == {
        operation: set(known) for operation, known in promise.FORMULAS.items()}


def test_a_cost_is_a_sum_of_three_terms():
    assert (Cost(1, 2, 3) + Cost(1, 0)).seconds(10, alpha=1.0, beta=0.1, gamma=0.01) == pytest.approx(2 + 2.0 + 0.3)
