"""bench crossover: from which size on a ring is faster than a tree, measured, beside the formula.

alpha and beta are fitted in the same run, to the times in which each rank sends arrays of many sizes to the next and adds what
comes from the one before, as in every step of these algorithms.  The model (`refpar/plan/alpha_beta.py`) then says what each
algorithm should take, and where their lines cross.
"""
from __future__ import annotations

from math import exp, log

import numpy as np

from refpar.bench.collectives import clocked
from refpar.comm.collectives import all_reduce
from refpar.comm.mesh import Axis
from refpar.plan.alpha_beta import cost, crossover

SIZES = [1 << power for power in range(8, 23)]      # bytes of the array
ROUNDS = 25         # the best counts: the model knows of no other jobs on the machine
SHORT, LONG = "tree", "ring"                        # few messages, and few bytes


def timed(wire) -> np.ndarray:
    """One rank's seconds, [sizes, 3, rounds]: a message both ways around the ring, a tree, a ring."""
    axis, table = Axis.world(wire), []
    for nbytes in SIZES:
        x, arriving = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
        calls = [lambda: step(axis, x, arriving), lambda: all_reduce(x, axis, algorithm=SHORT),
                 lambda: all_reduce(x, axis, algorithm=LONG)]
        table.append(clocked(axis, calls, ROUNDS).T)
    return np.array(table)


def step(axis, x, arriving):
    """What every rank does in one step of an algorithm: send, receive, and add."""
    coming = axis.irecv(arriving, (axis.index - 1) % axis.size)
    axis.send(x, (axis.index + 1) % axis.size)
    coming.wait()
    np.add(arriving, x, out=arriving)


def fitted(seconds) -> tuple[float, float]:
    """alpha and beta of seconds[i] = alpha + SIZES[i] beta, by least squares of the relative errors; none is below 0."""
    n = np.array(SIZES, float)
    weights = 1 / np.asarray(seconds)
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([weights, n * weights], axis=1), np.ones(len(n)), rcond=None)
    return max(float(alpha), 0.0), max(float(beta), 1e-15)


def crossing(short, long) -> float | None:
    """The size from which on `long` is never slower, between the two sizes around it; None where it never is, or always."""
    apart = np.log(np.asarray(long) / np.asarray(short))
    slower = np.flatnonzero(apart > 0)
    if not len(slower) or slower[-1] + 1 == len(SIZES):
        return None
    last = int(slower[-1])
    share = apart[last] / (apart[last] - apart[last + 1])
    return exp(log(SIZES[last]) + share * log(SIZES[last + 1] / SIZES[last]))


def run(world) -> int:
    """Print the table, on the rank that prints; the exit status."""
    ranks = world.size or 4
    seconds = np.min(np.max(world.run(timed, ranks), axis=0), axis=2)                   # [sizes, 3]
    alpha, beta = fitted(seconds[:, 0])
    costs = [cost("all_reduce", name, ranks) for name in (SHORT, LONG)]
    if not world.main:
        return 0
    print(f"all_reduce on {ranks} ranks as {world.kind}: microseconds of the slowest rank, best of {ROUNDS}, and by the model")
    print(f"{'bytes':>10}{'one step':>12}{SHORT:>12}{'model':>10}{LONG:>12}{'model':>10}{LONG + '/' + SHORT:>12}{'model':>8}")
    for nbytes, (one, short, long) in zip(SIZES, seconds):
        told = [factors.seconds(nbytes, alpha, beta) for factors in costs]
        print(f"{nbytes:10}{one * 1e6:12.1f}{short * 1e6:12.1f}{told[0] * 1e6:10.1f}{long * 1e6:12.1f}{told[1] * 1e6:10.1f}"
              f"{long / short:12.2f}{told[1] / told[0]:8.2f}")
    found = crossing(seconds[:, 1], seconds[:, 2])
    print(f"fitted: alpha {alpha * 1e6:.1f} us, beta {beta * 1e9:.3f} ns a byte, with the addition")
    print(f"the {LONG} is faster above: measured {f'{found:.0f} bytes' if found else 'nowhere or everywhere in this range'}, "
          + (f"by the formula {crossover(*costs, alpha, beta):.0f} bytes" if ranks > 2 else
             "by the formula everywhere: with 2 ranks it has as many messages and half the bytes"))
    return 0
