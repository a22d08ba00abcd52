"""Draw the ring all_reduce of 4 ranks, from the messages that it really sends, as SVG on stdout.

One grid for each round: a row for each rank, a column for each part of the array; in a cell the ranks whose addends are in it.
"""
import re

from refpar.config import Layout
from refpar.show.messages import How, describe

RANKS, CELL, GAP = 4, 44, 26
SHADES = ("#ffffff", "#dbe9f6", "#a9cbe8", "#6ea6d6", "#3f7fbf")       # by how many addends are in the sum
ALL = frozenset(range(RANKS))


def states() -> list[list[list[frozenset]]]:
    """After each round: [rank][part] -> the ranks whose addends that rank's copy of the part holds."""
    held = [[frozenset([rank])] * RANKS for rank in range(RANKS)]
    found = [[list(row) for row in held]]
    messages = describe(Layout(dp=RANKS), "all_reduce", RANKS, How("ring"))["messages"]
    for number in sorted({message["round"] for message in messages}):
        for message in (one for one in messages if one["round"] == number):
            part, ranks = re.fullmatch(r"x\[(\d+):\d+\] of ([\d+]+)", message["what"]).groups()
            arrived = frozenset(map(int, ranks.split("+")))
            to = message["to"]
            held[to][int(part)] = arrived if arrived == ALL else arrived | {to}     # finished: taken as it is; else added to
        found.append([list(row) for row in held])
    return found


def grid(state, number: int, x: int, y: int) -> list[str]:
    """One round, with its title."""
    title = "before" if number == 0 else f"after round {number}"
    lines = [f'<text x="{x + 2 * CELL}" y="{y - 8}" class="title">{title}</text>']
    for rank, row in enumerate(state):
        lines.append(f'<text x="{x - 6}" y="{y + rank * CELL + CELL // 2 + 4}" class="rank">{rank}</text>')
        for part, ranks in enumerate(row):
            left, top = x + part * CELL, y + rank * CELL
            lines.append(f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" fill="{SHADES[len(ranks)]}"/>')
            text, kind = ("all", "cell full") if ranks == ALL else ("+".join(map(str, sorted(ranks))), "cell")
            lines.append(f'<text x="{left + CELL // 2}" y="{top + CELL // 2 + 4}" class="{kind}">{text}</text>')
    return lines


def picture() -> str:
    """All rounds, four in a row."""
    step_x, step_y = 4 * CELL + 2 * GAP, 4 * CELL + 2 * GAP
    found = states()
    width, height = 4 * step_x + GAP, (len(found) + 3) // 4 * step_y + GAP
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
             "<style>rect{stroke:#555} text{fill:#222;font-size:13px;text-anchor:middle} .title{font-size:14px}",
             ".rank{text-anchor:end} .full{fill:#fff;font-weight:bold}</style>",
             f'<rect width="{width}" height="{height}" fill="#fff" style="stroke:none"/>']
    for number, state in enumerate(found):
        lines += grid(state, number, GAP * 2 + number % 4 * step_x, GAP * 2 + number // 4 * step_y)
    return "\n".join([*lines, "</svg>"])


if __name__ == "__main__":
    print(picture())
