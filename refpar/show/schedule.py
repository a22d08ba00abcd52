"""A schedule drawn in time: a row for each rank, idle time as dots, and below it the bubble and the memory.

    rank 0  0F0   0F1   .     .     .     .     0BW0        0BW1
"""
from __future__ import annotations

from refpar.schedules.check import in_flight
from refpar.parallel.schedule import Schedule, text
from refpar.plan.bubble import Sizes, bubble
from refpar.schedules.simulate import Costs, Timeline, simulate

WIDTH = 160
MOST = 2**14            # ranks times micro-batches


def draw(schedule: Schedule, costs: Costs = Costs()) -> str:
    """The picture and the numbers of a checked schedule on these costs."""
    line = simulate(schedule, costs)
    return "\n".join([f"schedule {schedule.name}: {len(schedule.rows)} ranks, {len(schedule.places)} stages, "
                      f"{schedule.micros} micro-batches" + f" of {schedule.slices} slices" * (schedule.slices > 1), "",
                      *chart(line), "", *numbers(line, costs)])


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


def formula(schedule: Schedule, costs: Costs):
    """The bubble by the closed formula, which is told of a rank's whole share of a micro-batch; None where there is none, and where
    messages take time."""
    sizes = Sizes(len(schedule.rows), schedule.micros, schedule.depth // len(schedule.rows), schedule.slices)
    if costs.latency:
        return None
    share = sizes.v * sizes.K
    return bubble(schedule.name, sizes, costs.F * share, costs.B * share, costs.W * share)


def describe(line: Timeline, costs: Costs = Costs()) -> dict:
    """The numbers, for a program to read."""
    by_formula = formula(line.schedule, costs)
    return {"schedule": line.schedule.name, "makespan": float(line.makespan), "bubble": float(line.bubble), "rate": float(line.rate),
            "formula": None if by_formula is None else float(by_formula),
            "in_flight": [max(counts, default=0) for counts in in_flight(line.schedule)], "bound": list(line.schedule.bound)}


def numbers(line: Timeline, costs: Costs = Costs()) -> list[str]:
    """The bubble and the activations in flight, in words."""
    found, ideal = describe(line, costs), float(max(line.busy))
    by_formula = "no closed formula holds here" if found["formula"] is None else f"by the formula {found['formula']:g}"
    return [f"makespan {found['makespan']:g}: work {ideal:g}, bubble {found['bubble']:g} "
            f"({100 * found['rate']:.2f} % of the longest span); {by_formula}",
            f"activations in flight, most on each rank: {' '.join(map(str, found['in_flight']))} "
            f"(bound {' '.join(map(str, found['bound']))})"]
