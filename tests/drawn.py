"""Properties on drawn situations, written once for threads and for real MPI ranks.

    def test_all_reduce(world):
        check(world, all_reduce_is_sum, situations())

`all_reduce_is_sum(world, situation)` raises where it does not hold.
"""
import os

from hypothesis import HealthCheck, given, settings
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
