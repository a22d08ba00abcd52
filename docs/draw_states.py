"""Draw how a summary is handed on among 8 ranks, from the messages that are really sent, as SVG on stdout.

One panel for each way: a line for each rank, the first at the top, and an arrow for each message, from the round in which it leaves
to that in which it has arrived.  Grey: the last rank's total on its way to all.
"""
import numpy as np

from refpar.comm.mesh import Axis
from refpar.comm.threads import ThreadWorld
from refpar.lesson import Diary, Told, steps_of
from refpar.nn.scan import Summary, merge, summary_of_state
from refpar.parallel import state
from refpar.watch import watching

RANKS, LINE, ROUND, GAP = 8, 24, 26, 40
WAYS = {"gather": "all_gather", "chain": "chain", "scan": "prefix scan"}


def handed_on(wire, way: str) -> Told:
    """One rank's program, and its diary."""
    cp, nothing = Axis.world(wire), summary_of_state(np.zeros((1, 1, 1, 1)))
    with watching(Diary()) as diary:
        here, _ = state.CARRIES[way](cp).forward(merge, Summary(nothing.decay / 2, nothing.state + 2.0**wire.rank), nothing)
    return Told(here, diary)


def panel(way: str, title: str, x: int, y: int) -> tuple[list[str], int]:
    """One way; and how many rounds it took."""
    steps = steps_of(ThreadWorld().run(handed_on, RANKS, way))
    rounds = max(step.round for step in steps)
    lines = [f'<text x="{x}" y="{y - 16}" class="title">{title}: {rounds} rounds</text>']
    for rank in range(RANKS):
        lines.append(f'<text x="{x - 14}" y="{y + rank * LINE + 4}">{rank}</text>')
        lines.append(f'<path d="M{x} {y + rank * LINE}h{rounds * ROUND}" class="rank"/>')
    sums = first_rounds(way)
    for step in steps:
        left, top, down = x + (step.round - 1) * ROUND, y + step.source * LINE, (step.to - step.source) * LINE
        kind = "sum" if step.round <= sums else "all"
        lines.append(f'<path d="M{left} {top}l{ROUND - 3} {down}" class="{kind}" marker-end="url(#{kind})"/>')
    return lines, rounds


def first_rounds(way: str) -> int:
    """Rounds until the last rank knows what lies before it."""
    return {"gather": RANKS - 1, "chain": RANKS - 1, "scan": (RANKS - 1).bit_length()}[way]


def picture() -> str:
    """The ways side by side."""
    panels, x = [], GAP
    for way, title in WAYS.items():
        lines, rounds = panel(way, title, x, 2 * GAP)
        panels += lines
        x += max(rounds, 7) * ROUND + GAP
    height = (RANKS - 1) * LINE + 3 * GAP
    heads = "".join(f'<marker id="{kind}" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" orient="auto">'
                    f'<path d="M0 0L6 3L0 6z" fill="{colour}"/></marker>' for kind, colour in (("sum", "#3f7fbf"), ("all", "#aaa")))
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {x} {height}" font-family="sans-serif">',
                      "<style>text{fill:#222;font-size:12px} .title{font-size:14px} .rank{stroke:#ddd;fill:none}",
                      ".sum{stroke:#3f7fbf;stroke-width:1.5;fill:none} .all{stroke:#aaa;fill:none}</style>",
                      f"<defs>{heads}</defs>",
                      f'<rect width="{x}" height="{height}" fill="#fff"/>', *panels, "</svg>"])


if __name__ == "__main__":
    print(picture())
