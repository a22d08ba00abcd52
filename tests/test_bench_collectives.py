"""What the benches compute from times; the times themselves are nobody's promise."""
import math

import pytest

from refpar.bench.collectives import OPERATIONS, algorithms, choice, measure
from refpar.bench.crossover import SIZES, crossing, fitted
from refpar.comm.threads import ThreadWorld
from refpar.plan.alpha_beta import cost, crossover


def test_alpha_and_beta_are_found_again():
    alpha, beta = fitted([3e-5 + n * 2e-10 for n in SIZES])
    assert math.isclose(alpha, 3e-5, rel_tol=1e-6) and math.isclose(beta, 2e-10, rel_tol=1e-6)


def test_where_two_lines_cross():
    costs = [cost("all_reduce", name, 8) for name in ("tree", "ring")]
    short, long = ([one.seconds(n, 1e-5, 1e-9) for n in SIZES] for one in costs)
    assert math.isclose(crossing(short, long), crossover(*costs, 1e-5, 1e-9), rel_tol=0.05)
    assert crossing(short, short) is None and crossing(long[:1] * len(SIZES), short[:1] * len(SIZES)) is None


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_runs_with_each_algorithm(name):
    seconds, ratios = measure(ThreadWorld(), name, 64, 3, beside=False)
    assert seconds > 0 and len(ratios) == len(algorithms(name)) - 1
    assert choice(name, 64, 3) in (None, *algorithms(name))
