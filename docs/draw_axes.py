"""Draw who talks to whom on 16 ranks, two on each axis, from the messages of two real training steps, as SVG on stdout.

A box is a stage of a replica; in it, tp side by side and cp one below the other.  A line joins two ranks that send to each other:
the colour is the axis, the width grows with the root of the bytes.
"""
from collections import Counter
from dataclasses import replace
from math import sqrt

from refpar.comm.mesh import coordinates
from refpar.comm.threads import ThreadWorld
from refpar.config import PRESETS, Layout
from refpar.oracle.run import run_sharded
from refpar.oracle.situation import PROOF, Situation
from refpar.watch import Observer, watching

LAYOUT = Layout(dp=2, pp=2, cp=2, tp=2, sp=True, cp_attention="zigzag", cp_mamba="chain")
STEPS = Situation(PRESETS["hybrid-uneven"], LAYOUT, replace(PROOF, rows=6, sequence=13, micro_batches=2), 0, (5, 16), (0.0, 0.4))
COLOURS = {"tp": ("#d1603d", "addends of a layer"), "cp": ("#3f7fbf", "keys, states"), "pp": ("#4d9d53", "hidden states"),
           "dp+cp": ("#8b6bb1", "gradients"), "others": ("#bbb", "gradients of norms, the gradient norm, the loss")}
NEAR, BOX, RADIUS, LEFT, TOP = 74, 230, 13, 100, 60


class Pairs(Observer):
    """Bytes that a rank sends to each other one, by axis."""

    def __init__(self):
        self.bytes = Counter()

    def message(self, message):
        if message.way == "send":
            self.bytes[message.peer, message.axis if message.axis in COLOURS else "others"] += message.bytes


def sent(wire) -> Counter:
    """One rank's program."""
    with watching(Pairs()) as pairs:
        run_sharded(wire, STEPS)
    return pairs.bytes


def place(rank: int) -> tuple[int, int]:
    """Where a rank stands."""
    at = coordinates(LAYOUT, rank)
    return LEFT + at["pp"] * BOX + at["tp"] * NEAR, TOP + at["dp"] * BOX + at["cp"] * NEAR


def lines() -> tuple[list[str], Counter]:
    """A curve for each pair and axis, those of many bytes first, so that thin ones stay visible; and the bytes of each axis."""
    pairs, axes = Counter(), Counter()
    for rank, told in enumerate(ThreadWorld().run(sent, LAYOUT.ranks)):
        for (peer, axis), nbytes in told.items():
            pairs[min(rank, peer), max(rank, peer), axis] += nbytes
            axes[axis] += nbytes
    found = []
    for (one, other, axis), nbytes in sorted(pairs.items(), key=lambda item: (-item[1], item[0])):
        (x, y), (to_x, to_y) = place(one), place(other)
        bend = 0.12 * (list(COLOURS).index(axis) - 1)           # axes that share a pair lie side by side
        middle_x, middle_y = (x + to_x) / 2 + bend * (to_y - y), (y + to_y) / 2 - bend * (to_x - x)
        found.append(f'<path d="M{x} {y}Q{middle_x:.0f} {middle_y:.0f} {to_x} {to_y}" stroke="{COLOURS[axis][0]}" '
                     f'stroke-width="{max(1, sqrt(nbytes) / 60):.1f}"/>')
    return found, axes


def picture() -> str:
    """Boxes, lines, ranks, legend."""
    drawn, axes = lines()
    width, height, side = LEFT + 2 * BOX - 20, TOP + 2 * BOX - 68 + 22 * len(COLOURS), NEAR + 4 * RADIUS
    boxes = [f'<rect x="{LEFT + pp * BOX - 2 * RADIUS}" y="{TOP + dp * BOX - 2 * RADIUS}" width="{side}" height="{side}" class="box"/>'
             f'<text x="{LEFT + pp * BOX - 2 * RADIUS - 6}" y="{TOP + dp * BOX + NEAR // 2 - 4}" class="right">replica {dp}</text>'
             f'<text x="{LEFT + pp * BOX - 2 * RADIUS - 6}" y="{TOP + dp * BOX + NEAR // 2 + 12}" class="right">stage {pp}</text>'
             for dp in range(2) for pp in range(2)]
    ranks = [f'<circle cx="{x}" cy="{y}" r="{RADIUS}"/><text x="{x}" y="{y + 4}">{rank}</text>'
             for rank in range(LAYOUT.ranks) for x, y in [place(rank)]]
    legend = []
    for number, (axis, (colour, words)) in enumerate(COLOURS.items()):
        y = TOP + 2 * BOX - 68 + 22 * number
        legend.append(f'<path d="M{LEFT - 26} {y}h30" stroke="{colour}" stroke-width="4"/><text x="{LEFT + 14}" y="{y + 4}" class="left">'
                      f'{axis}: {words}, {axes[axis]:,} bytes</text>')
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
                      "<style>text{fill:#222;font-size:12px;text-anchor:middle} .left{text-anchor:start} .right{text-anchor:end}",
                      "path{fill:none} circle{fill:#fff;stroke:#555} .box{fill:#f4f4f4;stroke:#ccc}</style>",
                      f'<rect width="{width}" height="{height}" fill="#fff"/>', *boxes, *drawn, *ranks, *legend, "</svg>"])


if __name__ == "__main__":
    print(picture())
