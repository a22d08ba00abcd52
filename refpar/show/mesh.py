"""The map of ranks: where each one stands, and the groups that talk to each other on each axis.

The survey draws two meshes, of 8 and of 16 ranks, with lists beside them.  For some axes it lists the members of one replica or one
stage in place of the groups that communicate; for its two meshes both are shown.
"""
from __future__ import annotations

from refpar.comm.mesh import coordinates, groups, rank_at
from refpar.config import Layout

WIDTH = 100

# The survey's figure -> axis -> the axes whose members it lists there: the axis itself where it lists communication groups.
FIGURES: dict[Layout, tuple[str, dict[str, tuple[str, ...]]]] = {
    Layout(dp=2, pp=2, tp=2): ("figure 4", {"tp": ("tp",), "pp": ("pp",), "dp": ("pp", "cp", "tp")}),
    Layout(dp=2, pp=2, cp=2, tp=2): ("figure 5", {"tp": ("tp",), "cp": ("cp",), "pp": ("cp", "tp")}),
}
MEMBERS = {"dp": "replica", "pp": "stage"}


def describe(layout: Layout) -> dict:
    """Coordinates of each rank, and groups of each axis, for a program to read."""
    found = {"mesh": str(layout), "order": list(layout.order), "ranks": [coordinates(layout, rank) for rank in range(layout.ranks)],
             "groups": {axis: groups(layout, axis) for axis in layout.order}}
    if layout in FIGURES:
        figure, lists = FIGURES[layout]
        found["survey"] = {"figure": figure, "lists": {axis: groups(layout, *listed) for axis, listed in lists.items()}}
    return found


def draw(layout: Layout) -> str:
    """The map, the groups, and the survey's lists where this is one of its meshes."""
    first, last = layout.order[0], layout.order[len(layout.order) - 1]
    lines = [f"mesh {layout}: {layout.ranks} ranks, {first} outermost, {last} innermost", "", *grid(layout), "",
             "groups: the ranks that differ in that coordinate alone, and so talk to each other on that axis"]
    for axis in layout.order:
        lines += wrapped(f"  {axis}  ", groups(layout, axis))
    if layout in FIGURES:
        lines += ["", *survey(layout)]
    return "\n".join(lines)


def grid(layout: Layout) -> list[str]:
    """A row for each place on the outer axes, a column for each on the innermost; axes of one rank are left out of the labels."""
    *outer, inner = layout.order
    size, cell = getattr(layout, inner), len(str(layout.ranks - 1)) + len(inner) + 4
    shown = [axis for axis in outer if getattr(layout, axis) > 1]
    indent = 2 + sum(len(axis) + 4 for axis in shown)
    lines, before = [" " * indent + columns([f"{inner}={i}" for i in range(size)], cell, indent)], {}
    for rank in range(0, layout.ranks, size):
        where = coordinates(layout, rank)
        new, label = False, "  "
        for axis in shown:
            new = new or where[axis] != before.get(axis)
            label += f"{f'{axis}={where[axis]}' if new else '':<{len(axis) + 4}}"
        lines.append(label + columns([str(rank_at(layout, where | {inner: i})) for i in range(size)], cell, indent))
        before = where
    return lines


def columns(words: list[str], cell: int, indent: int) -> str:
    """Words in columns; the middle ones are left out where they would not fit."""
    fit = (WIDTH - indent) // cell
    if len(words) > fit:
        words = [*words[:fit - 2], "...", words[len(words) - 1]]
    return "".join(f"{word:>{cell}}" for word in words)


def wrapped(head: str, lists: list[list[int]]) -> list[str]:
    """[[0,4],[1,5],...] behind a head, in as many lines as it takes, broken between groups."""
    words = [f"[{','.join(map(str, group))}]" for group in lists]
    words = [("[" if i == 0 else "") + word + ("," if i < len(words) - 1 else "]") for i, word in enumerate(words)]
    lines = [head]
    for word in words:
        if len(lines[len(lines) - 1]) + len(word) > WIDTH and lines[len(lines) - 1].strip() not in ("", head.strip()):
            lines.append(" " * len(head))
        lines[len(lines) - 1] += word
    return lines


def survey(layout: Layout) -> list[str]:
    """What the survey prints beside this mesh, and the correction where its list is not of groups that communicate."""
    figure, lists = FIGURES[layout]
    lines = [f"the survey's {figure} prints"]
    for axis, listed in lists.items():
        lines += wrapped(f"  {axis.upper()}: ", groups(layout, *listed))
        if listed != (axis,):
            lines += [f"      corrected: these are the members of each {MEMBERS[axis]}; {axis} communicates in"]
            lines += wrapped("      ", groups(layout, axis))
    return lines
