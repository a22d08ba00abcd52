"""Draw which rank has which part of causal attention, for the three orders of tokens, as SVG on stdout.

One grid for each order.  Row: a query; column: a key; coloured where the query may see the key, with the colour of the rank that
holds the query.  Under it the pairs of each rank.
"""
import numpy as np

from refpar.parallel.order import columns

RANKS, TOKENS, CELL, GAP = 4, 24, 10, 44
COLOURS = ("#3f7fbf", "#e0a030", "#58a868", "#c0504d")
ORDERS = {"contiguous": "contiguous", "zig-zag": "zigzag", "striped": "striped"}


def grid(title: str, way: str, x: int, y: int) -> list[str]:
    """One order, with its title and its counts."""
    lines = [f'<text x="{x + TOKENS * CELL // 2}" y="{y - 10}" class="title">{title}</text>']
    for rank in range(RANKS):
        mine = columns(way, TOKENS, RANKS, rank)
        for query in mine.tolist():
            width = (query + 1) * CELL
            lines.append(f'<rect x="{x}" y="{y + query * CELL}" width="{width}" height="{CELL}" fill="{COLOURS[rank]}"/>')
        place = x + rank * TOKENS * CELL // RANKS
        lines.append(f'<rect x="{place}" y="{y + TOKENS * CELL + 10}" width="{CELL}" height="{CELL}" fill="{COLOURS[rank]}"/>')
        lines.append(f'<text x="{place + 16}" y="{y + TOKENS * CELL + 20}">{int(np.sum(mine + 1))}</text>')
    return [*lines, f'<rect x="{x}" y="{y}" width="{TOKENS * CELL}" height="{TOKENS * CELL}" class="frame"/>']


def picture() -> str:
    """The orders side by side."""
    step = TOKENS * CELL + GAP
    width, height = len(ORDERS) * step + GAP, TOKENS * CELL + 2 * GAP
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
             "<style>rect{stroke:#fff;stroke-width:0.5} .frame{fill:none;stroke:#555} text{fill:#222;font-size:12px}",
             ".title{font-size:14px;text-anchor:middle}</style>",
             f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for number, (title, way) in enumerate(ORDERS.items()):
        lines += grid(title, way, GAP + number * step, GAP)
    return "\n".join([*lines, "</svg>"])


if __name__ == "__main__":
    print(picture())
