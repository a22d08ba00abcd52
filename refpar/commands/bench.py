"""`refpar bench`: refpar measured beside what others use."""
from __future__ import annotations

from typing import Callable

from refpar.bench import collectives, crossover, scan, step
from refpar.commands.memory import keep_pages

# What is measured: the arguments -> what runs in a world, or ValueError.
BENCHES: dict[str, Callable] = {"collectives": lambda args: collectives.run, "crossover": lambda args: crossover.run,
                                "step": step.prepare, "scan": scan.prepare}


def prepare(world, args) -> Callable:
    """Refuse what cannot be measured."""
    if args.what not in BENCHES:
        wrong = "nothing is named" if args.what is None else f"{args.what!r} cannot be measured"
        raise ValueError(f"{wrong}; name {' or '.join(BENCHES)}")
    return BENCHES[args.what](args)


def run(world, bench: Callable) -> int:
    """Measure, and print a table.  Every contestant has the same malloc."""
    keep_pages()
    return bench(world)
