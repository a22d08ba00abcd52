"""Several contestants on one core, measured in turn.

A round runs each once, so that whatever else the machine does slows all alike; the clock is the CPU time of the process, user and
system, so that waiting does not count and page faults do.  The median of the rounds is the result.
"""
from __future__ import annotations

import time
from statistics import median
from typing import Callable


def alternate(contestants: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Name -> what it runs; each is warmed up once, then run once in each of the rounds -> name -> seconds of each round."""
    for call in contestants.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, call in contestants.items():
            begun = time.process_time()
            call()
            seconds[name].append(time.process_time() - begun)
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Name -> its median."""
    return {name: median(times) for name, times in seconds.items()}
