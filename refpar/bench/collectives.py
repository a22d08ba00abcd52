"""bench collectives: every algorithm of every collective beside the MPI library's own call.

All are timed in turn, round by round, so that whatever else the machine does slows all alike; a round's time is that of its slowest
rank.  The table has the library's time, the median of the rounds, and for each algorithm the median of its ratio to the library's
time of the same round; a star stands behind what refpar's table would choose.  The library receives into buffers that it was given
before; ours makes its result anew in each call, as it does in training.  Threads have no library: there the first algorithm is the
measure.

This is the one place that calls the library's collectives.
"""
from __future__ import annotations

import time
from statistics import median
from typing import Callable, NamedTuple

import numpy as np

from refpar.algorithms import ALGORITHMS
from refpar.algorithms.gather import gather, scatter
from refpar.comm import collectives
from refpar.comm.choose import Task, algorithm
from refpar.comm.mesh import Axis
from refpar.config import shares

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)        # bytes of the whole array
BUDGET = 1 << 26                                    # bytes of all rounds of one line, in whole arrays,
ROUNDS = (5, 40)                                    # but no fewer and no more than these


class Operation(NamedTuple):
    """ours(x, axis, **algorithm) and library(x, out, comm), for x [p, n/p] on each rank; `out` has the shape of x."""
    ours: Callable
    library: Callable


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(collectives.all_reduce, lambda x, out, comm: comm.Allreduce(x, out)),
    "reduce_scatter": Operation(collectives.reduce_scatter, lambda x, out, comm: comm.Reduce_scatter_block(x, out[0])),
    "all_gather": Operation(lambda x, axis, **how: collectives.all_gather(x[:1], axis, 0, [1] * axis.size, **how),
                            lambda x, out, comm: comm.Allgather(x[0], out)),
    "all_to_all": Operation(lambda x, axis, **how: collectives.all_to_all(x, axis, 0, [1] * axis.size, 1, [x.shape[1]] * axis.size,
                                                                          **how),
                            lambda x, out, comm: comm.Alltoall(x, out)),
    "broadcast": Operation(collectives.broadcast, lambda x, out, comm: comm.Bcast(x)),
    "reduce": Operation(collectives.reduce, lambda x, out, comm: comm.Reduce(x, out)),
    "gather": Operation(lambda x, axis: gather(x[:1], axis, 0, [1] * axis.size), lambda x, out, comm: comm.Gather(x[0], out)),
    "scatter": Operation(scatter, lambda x, out, comm: comm.Scatter(x, out[0])),
    "barrier": Operation(lambda x, axis: collectives.barrier(axis), lambda x, out, comm: comm.Barrier()),
}


def algorithms(name: str) -> list[str]:
    """Those that are told apart here: a hierarchy needs nodes, and this machine is one."""
    return [one for one in ALGORITHMS.get(name, ["tree"]) if one != "hierarchical"]


def timed(wire, name: str, nbytes: int, rounds: int, beside: bool) -> np.ndarray:
    """One rank's seconds, [rounds, columns]: the library's, if it is there, and each algorithm's."""
    axis, operation = Axis.world(wire), OPERATIONS[name]
    x = np.ones((wire.size, max(nbytes // 4 // wire.size, 1)), np.float32)              # [p, n/p]
    out = np.zeros_like(x)
    calls = [lambda: operation.library(x, out, wire.comm)] * beside
    for one in algorithms(name):
        how = {"algorithm": ALGORITHMS[name][one]} if name in ALGORITHMS else {}
        calls.append(lambda how=how: operation.ours(x, axis, **how))
    return clocked(axis, calls, rounds)


def clocked(axis, calls: list[Callable], rounds: int) -> np.ndarray:
    """One rank's seconds of each call, [rounds, calls], in turn; all ranks begin each together."""
    seconds = np.zeros((rounds + 1, len(calls)))
    for line in seconds:
        for column, call in enumerate(calls):
            collectives.barrier(axis)
            start = time.perf_counter()
            call()
            line[column] = time.perf_counter() - start
    return seconds[1:]                                                                  # the first round warms up


def measure(world, name: str, nbytes: int, ranks: int, beside: bool) -> tuple[float, list[float]]:
    """Median seconds of the first column, and the median ratio of every other column to it."""
    rounds = min(max(BUDGET // nbytes, ROUNDS[0]), ROUNDS[1])
    slowest = np.max(world.run(timed, ranks, name, nbytes, rounds, beside), axis=0)     # [rounds, columns]
    return median(slowest[:, 0].tolist()), np.median(slowest / slowest[:, :1], axis=0)[1:].tolist()


def choice(name: str, nbytes: int, ranks: int) -> str | None:
    """What the table of algorithms would choose."""
    count = max(nbytes // 4 // ranks, 1) * ranks
    sizes = [shares(count, ranks)] * ranks if name == "all_to_all" else shares(count, ranks)
    task = Task(sizes, np.dtype(np.float32), [list(range(ranks))])
    return algorithm(name, None, task).name if name in ALGORITHMS else None


def run(world) -> int:
    """Print the tables, on the rank that prints; the exit status.  All ranks of the world take part (4 where it has any number)."""
    ranks, beside = world.size or 4, world.kind == "processes"
    say = print if world.main else lambda *words, **options: None
    say(f"{ranks} ranks as {world.kind}, float32; microseconds of the slowest rank, median over rounds, and times that")
    if not beside:
        say("threads have no MPI library: there is nothing to compare with (run this under mpiexec)")
    for name in OPERATIONS:
        known = algorithms(name)
        first, others = ("library", known) if beside else (known[0], known[1:])
        say(f"\n{name:16}{'bytes':>10}{first:>12}" + "".join(f"{one:>14}" for one in others))
        for nbytes in SIZES if name != "barrier" else (1,):
            seconds, ratios = measure(world, name, nbytes, ranks, beside)
            star = choice(name, nbytes, ranks)
            cells = [f"{ratio:12.2f}{' *' if one == star else '  '}" for one, ratio in zip(others, ratios)]
            say(f"{'':16}{nbytes if name != 'barrier' else 0:10}{seconds * 1e6:12.1f}" + "".join(cells), flush=True)
    return 0
