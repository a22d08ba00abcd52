"""`refpar bench`: refpar measured beside what others use."""
from __future__ import annotations

from typing import Callable

from refpar.bench import collectives, crossover

BENCHES: dict[str, Callable] = {"collectives": collectives.run, "crossover": crossover.run}


def prepare(world, args) -> Callable:
    """Refuse what cannot be measured."""
    if args.what not in BENCHES:
        wrong = "nothing is named" if args.what is None else f"{args.what!r} cannot be measured"
        raise ValueError(f"{wrong}; name {' or '.join(BENCHES)}")
    return BENCHES[args.what]


def run(world, bench: Callable) -> int:
    """Measure, and print a table."""
    return bench(world)
