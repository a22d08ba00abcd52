"""A schedule drawn in time: a row for each rank, idle time as dots, and below it the bubble and the memory.

    rank 0  0F0   0F1   .     .     .     .     0BW0        0BW1
"""
from __future__ import annotations

from refpar.schedules.check import in_flight
from refpar.parallel.schedule import Schedule, text
from refpar.schedules.simulate import Costs, Timeline, simulate

WIDTH = 160


def draw(schedule: Schedule, costs: Costs = Costs()) -> str:
    """The picture and the numbers of a checked schedule on these costs."""
    line = simulate(schedule, costs)
    return "\n".join([f"schedule {schedule.name}: {len(schedule.rows)} ranks, {len(schedule.places)} stages, "
                      f"{schedule.micros} micro-batches" + f" of {schedule.slices} slices" * (schedule.slices > 1), "",
                      *chart(line), "", *numbers(line)])


def chart(line: Timeline) -> list[str]:
    """The rows: as many columns for the shortest slot as its name needs, and others in proportion."""
    slots = [(text(slot), end - start) for row, times in zip(line.schedule.rows, line.times)
             for slot, (start, end) in zip(row, times)]
    unit = max(((len(name) + 1) / time for name, time in slots if time > 0), default=1)
    rows = []
    for rank, (row, times) in enumerate(zip(line.schedule.rows, line.times)):
        drawn = ""
        for slot, (start, end) in zip(row, times):
            drawn += idle(round(start * unit) - len(drawn)) + f"{text(slot):<{round(end * unit) - round(start * unit)}}"
        shown = f"rank {rank:<{len(str(len(line.times) - 1))}}  {drawn}{idle(round(line.makespan * unit) - len(drawn))}".rstrip()
        rows.append(shown if len(shown) <= WIDTH else f"{shown[:WIDTH - 4]} ...")
    return rows


def idle(columns: int) -> str:
    """A dot, and blanks."""
    return f"{'.':<{columns}}" if columns > 0 else ""


def describe(line: Timeline) -> dict:
    """The numbers, for a program to read."""
    return {"schedule": line.schedule.name, "makespan": line.makespan, "bubble": line.bubble, "rate": float(line.rate),
            "in_flight": [max(counts, default=0) for counts in in_flight(line.schedule)], "bound": list(line.schedule.bound)}


def numbers(line: Timeline) -> list[str]:
    """The bubble and the activations in flight, in words."""
    found, ideal = describe(line), max(line.busy)
    return [f"makespan {float(found['makespan']):g}: work {float(ideal):g}, bubble {float(found['bubble']):g} "
            f"({100 * found['rate']:.2f} % of the longest span)",
            f"activations in flight, most on each rank: {' '.join(map(str, found['in_flight']))} "
            f"(bound {' '.join(map(str, found['bound']))})"]
