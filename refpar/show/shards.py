"""What each rank holds of each weight, and over which axes its gradient is summed: law 2 as a table, from the declared dims alone.

Layers of a kind have the same parameters, so a kind is one entry.  On an axis a parameter is
    Shard(dim)   cut along that dim
    Replicate    whole, and each rank meets other activations: the gradient is a sum over the axis
    Invariant    whole, and each rank does the same with it: the gradient is the same already
Where tp has more ranks than key heads or groups, a run of ranks holds the same part, and its gradient is summed over the run.
A pipeline stage (pp) holds a share of the layers, and each of them wholly.
"""
from __future__ import annotations

import math
from typing import NamedTuple

from refpar.config import AXES, Layout, Model, share
from refpar.nn.build import build
from refpar.parallel.placement import axis_of, inside_of, part, shared_units, summed_axes
from refpar.show import tokens


class Row(NamedTuple):
    """One parameter of one kind of layer."""
    name: str
    dims: str
    whole: list[int]
    held: list[list[int]]               # for each dim, its lengths on the ranks that cut it
    placement: dict[str, str]           # axis -> kind
    summed: list[str]                   # axes over which the gradient is summed


class Kind(NamedTuple):
    """Layers with the same parameters."""
    kind: str
    layers: list[int]
    rows: list[Row]


def check(model: Model, layout: Layout):
    """ValueError where a stage would hold no layer."""
    layers = len(build(model).layers)
    if layout.pp > layers:
        raise ValueError(f"pp={layout.pp} is more than the model's {layers} layers, and a stage holds at least one of them")


def kinds(model: Model, layout: Layout) -> list[Kind]:
    """Every kind of layer, in the order of its first."""
    chain = build(model)
    dims, inside = chain.dims(), inside_of(chain)
    found: dict[str, Kind] = {}
    for name, _ in chain.layers:
        number, kind = name.split(".")
        rows = [row(model, layout, p, text, inside[name, p]) for p, text in dims[name].items()]
        found.setdefault(kind, Kind(kind, [], rows)).layers.append(int(number))
    return list(found.values())


def row(model: Model, layout: Layout, name: str, dims: str, inside: bool) -> Row:
    """One parameter, by its dims and whether it stands inside its layer's seams."""
    summed = list(summed_axes(dims, inside, layout.sp))
    placement = {axis: "Replicate" if axis in summed else "Invariant" for axis in AXES}
    parts = [part(model, dims, layout, {"tp": rank}) for rank in range(layout.tp)]
    held = [sorted({place.stop - place.start for place in places}) for places in zip(*parts)]
    for dim, word in enumerate(dims.split()):
        if axis_of(word):
            placement[axis_of(word)] = f"Shard({dim})"
    placement["pp"] = "one stage"
    runs = [] if shared_units(model, dims, layout) is None else ["tp run"]
    return Row(name, dims, list(model.shape(dims)), held, placement, summed + runs)


def totals(model: Model, layout: Layout) -> dict[tuple[int, int], int]:
    """(pp, tp) -> elements that a rank there holds; dp and cp change nothing."""
    chain = build(model)
    dims, found = chain.dims(), {}
    for stage in range(layout.pp):
        texts = [text for name, _ in chain.layers[share(len(chain.layers), layout.pp, stage)] for text in dims[name].values()]
        for rank in range(layout.tp):
            parts = (part(model, text, layout, {"tp": rank}) for text in texts)
            found[stage, rank] = sum(math.prod(place.stop - place.start for place in places) for places in parts)
    return found


def describe(model: Model, layout: Layout) -> dict:
    """The table, for a program to read."""
    return {"mesh": str(layout),
            "kinds": [kind._replace(rows=[row._asdict() for row in kind.rows])._asdict() for kind in kinds(model, layout)],
            "totals": [{"pp": pp, "tp": tp, "elements": count} for (pp, tp), count in totals(model, layout).items()],
            "tokens": tokens.describe(model, layout)}


def draw(model: Model, layout: Layout, name: str) -> str:
    """The table, at most 100 columns wide."""
    lines = [f"{name} on mesh {layout}{', sp' * layout.sp}: what one rank holds of each weight", "",
             f"  {'parameter':<12}{'dims':<14}{'whole':<16}{'one rank':<18}{'tp':<11}{'dp, cp':<11}summed over"]
    for kind in kinds(model, layout):
        lines.append(f"{kind.kind}, {counted(kind.layers)}")
        lines += [drawn(row) for row in kind.rows]
    if model.tied:
        lines.append("the head's table is the embedding's: their gradients are added up")
    return "\n".join(lines + ["", *summary(model, layout), "", *tokens.draw(model, layout),
                              "Shard(d): cut along dim d.  Replicate: whole, and each rank meets other activations.",
                              "Invariant: whole, and each rank does the same.  A gradient is summed over the axes over",
                              "which the activations that the weight meets are sharded, less the axes of its own shards.",
                              "tp run: those ranks of tp that share a key head or a group, and hold the same part."])


def drawn(row: Row) -> str:
    """One parameter's line."""
    held = ", ".join("/".join(map(str, lengths)) for lengths in row.held)
    whole = ", ".join(map(str, row.whole))
    return (f"  {row.name:<12}{row.dims:<14}{f'[{whole}]':<16}{f'[{held}]':<18}{row.placement['tp']:<11}{row.placement['dp']:<11}"
            f"{', '.join(row.summed)}")


def counted(layers: list[int]) -> str:
    """"4 layers (1, 3, 5, 7)" or "layer 0"."""
    if len(layers) < 2:
        return f"layer {layers[0]}"
    shown = layers if len(layers) < 13 else [*layers[:3], "...", *layers[len(layers) - 1:]]
    return f"{len(layers)} layers ({', '.join(map(str, shown))})"


def summary(model: Model, layout: Layout) -> list[str]:
    """How much each rank holds in all, a line for each place on pp and tp."""
    held = totals(model, layout)
    whole = sum(totals(model, Layout()).values())
    stages = [share(len(build(model).layers), layout.pp, stage) for stage in range(layout.pp)]
    lines = [f"held in all, of {whole:,} elements (ranks that differ in dp or cp alone hold the same)"]
    lines += [f"  pp={pp} tp={tp}  {count:>14,}  {count / whole:6.1%}  layers {stages[pp].start} to {stages[pp].stop - 1}"
              for (pp, tp), count in held.items()]
    if len(lines) > 17:
        lines[9:len(lines) - 8] = ["  ..."]
    return lines
