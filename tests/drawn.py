"""Properties on drawn situations, written once for threads and for real MPI ranks.

    def test_all_reduce(world):
        check(world, all_reduce_is_sum, situations())

`all_reduce_is_sum(world, situation)` raises where it does not hold.
"""
import os
from functools import cache

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from refpar.comm.threads import ThreadWorld

CASES = settings(max_examples=100, deadline=None, derandomize=bool(os.environ.get("CI")),
                 suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
PROCESSES = 20      # cases on MPI ranks, at most: they cost ten times as much


def thread_worlds():
    """Threads in the usual order with the usual eager limit; or another order, small or no eager sends."""
    return st.builds(ThreadWorld, seed=st.none() | st.integers(0, 999), eager=st.sampled_from([65536, 64, 0]))


def check(world, holds, situations, examples: int = 100):
    """holds(world, situation) for `examples` drawn situations; on processes for a few of them.

    On threads the order of ranks and the eager limit are drawn too.
    """
    if world.kind == "threads":
        count = examples

        def judged(situation, world):
            holds(world, situation)
        drawn = given(situation=situations, world=thread_worlds())
    else:
        count = min(examples, PROCESSES)

        def judged(situation):
            holds(world, situation)
        drawn = given(situation=situations)
    judged.__name__ = judged.__qualname__ = f"{holds.__name__}_on_{world.kind}"     # hypothesis keeps failures by name
    settings(CASES, max_examples=count)(drawn(judged))()


@cache
def draws(strategy, number: int = 0) -> list:
    """A hundred situations that a strategy draws, without looking for anything: the same each time for one `number`."""
    found = []

    @seed(number)
    @settings(max_examples=100, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def draw(situation):
        found.append(situation)
    draw()
    return found


def first(strategy, wanted, most: int = 80):
    """The first situation drawn that is `wanted`, or None.  What one run draws is alike: so up to `most` runs, each with its own seed."""
    return next((situation for number in range(most) for situation in draws(strategy, number) if wanted(situation)), None)
