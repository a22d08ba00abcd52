"""bench collectives: every hand-written collective beside the MPI library's own call.

Both are timed in turn, round by round, so that whatever else the machine does slows both alike; a round's time is that of its
slowest rank.  The table has the median of the rounds, and of the ratio within a round.  The library receives into buffers that it
was given before; ours makes its result anew in each call, as it does in training.

This is the one place that calls the library's collectives.
"""
from __future__ import annotations

import time
from statistics import median
from typing import Callable, NamedTuple

import numpy as np

from refpar.comm import trees
from refpar.comm.collectives import all_gather, all_reduce, barrier, exchange, reduce_scatter
from refpar.comm.mesh import Axis

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)        # bytes of the whole array
BUDGET = 1 << 26                                    # bytes of all rounds of one line, in whole arrays,
ROUNDS = (5, 40)                                    # but no fewer and no more than these


class Operation(NamedTuple):
    """ours(x, axis) and library(x, out, comm), for x [p, n/p] on each rank; `out` has the shape of x."""
    ours: Callable
    library: Callable


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(all_reduce, lambda x, out, comm: comm.Allreduce(x, out)),
    "reduce_scatter": Operation(reduce_scatter, lambda x, out, comm: comm.Reduce_scatter_block(x, out[0])),
    "all_gather": Operation(lambda x, axis: all_gather(x[:1], axis, 0, [1] * axis.size),
                            lambda x, out, comm: comm.Allgather(x[0], out)),
    "all_to_all": Operation(lambda x, axis: exchange(list(x), axis, [x[0].shape] * axis.size),
                            lambda x, out, comm: comm.Alltoall(x, out)),
    "broadcast": Operation(trees.broadcast, lambda x, out, comm: comm.Bcast(x)),
    "reduce": Operation(trees.reduce, lambda x, out, comm: comm.Reduce(x, out)),
    "gather": Operation(lambda x, axis: trees.gather(x[:1], axis, 0, [1] * axis.size), lambda x, out, comm: comm.Gather(x[0], out)),
    "scatter": Operation(trees.scatter, lambda x, out, comm: comm.Scatter(x, out[0])),
    "barrier": Operation(lambda x, axis: barrier(axis), lambda x, out, comm: comm.Barrier()),
}


def timed(wire, name: str, nbytes: int, rounds: int, beside: bool) -> np.ndarray:
    """One rank's seconds, [rounds, 2]: ours, the library's (zeros unless `beside`)."""
    axis, operation = Axis.world(wire), OPERATIONS[name]
    x = np.ones((wire.size, max(nbytes // 4 // wire.size, 1)), np.float32)              # [p, n/p]
    out, seconds = np.zeros_like(x), np.zeros((rounds + 1, 2))
    calls = [lambda: operation.ours(x, axis)]
    if beside:
        calls.append(lambda: operation.library(x, out, wire.comm))
    for line in seconds:
        for column, call in enumerate(calls):
            barrier(axis)
            start = time.perf_counter()
            call()
            line[column] = time.perf_counter() - start
    return seconds[1:]                                                                  # the first round warms up


def measure(world, name: str, nbytes: int, ranks: int, beside: bool) -> tuple[float, float, float]:
    """Median seconds of ours and of the library, and the median ratio."""
    rounds = min(max(BUDGET // nbytes, ROUNDS[0]), ROUNDS[1])
    slowest = np.max(world.run(timed, ranks, name, nbytes, rounds, beside), axis=0)     # [rounds, 2]
    ours, library = (median(column) for column in slowest.T.tolist())
    return ours, library, median(one / other for one, other in slowest.tolist()) if beside else 0.0


def run(world) -> int:
    """Print the table, on the rank that prints; the exit status.  All ranks of the world take part (4 where it has any number)."""
    ranks, beside = world.size or 4, world.kind == "processes"
    say = print if world.main else lambda *words, **options: None
    say(f"{ranks} ranks as {world.kind}, float32, microseconds of the slowest rank, median over rounds")
    if not beside:
        say("threads have no MPI library: there is nothing to compare with (run this under mpiexec)")
    say(f"{'':16}{'bytes':>10}{'ours':>12}" + (f"{'library':>12}{'ours/library':>14}" if beside else ""))
    for name in OPERATIONS:
        for nbytes in SIZES if name != "barrier" else (1,):
            ours, library, ratio = measure(world, name, nbytes, ranks, beside)
            size = nbytes if name != "barrier" else 0
            say(f"{name:16}{size:10}{ours * 1e6:12.1f}" + (f"{library * 1e6:12.1f}{ratio:14.2f}" if beside else ""), flush=True)
    return 0
