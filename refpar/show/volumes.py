"""The survey's comparison in the terminal: what one layer sends as the sequence grows, Transformer against Mamba.

All strategies have the same ranks.  Bytes are those of the algorithms that run (`plan/survey.py`); where ranks differ, the mean.
"""
from __future__ import annotations

from dataclasses import replace

from refpar.config import SEQUENCE, Layout, Model
from refpar.plan.survey import ROWS, Row, Sizes, gradients, layer_sends

SHORTEST, LONGEST, MOST = 1024, 1 << 18, 64
DTYPE, ITEMSIZE = "float32", 4
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def check(model: Model, layout: Layout, longest: int):
    """ValueError where there is nothing to compare."""
    if model.cut:
        raise ValueError("model: the mixer is cut out, and nothing is left to compare")
    if layout.pp > 1:
        raise ValueError(f"mesh {layout} has pp={layout.pp}, and a layer stands on one stage: leave pp out")
    if layout.ranks > MOST:
        raise ValueError(f"mesh {layout} has {layout.ranks} ranks, and volumes are compared for at most {MOST}")
    if longest > SEQUENCE:
        raise ValueError(f"--sequence {longest} must be at most {SEQUENCE}")


def with_both(model: Model) -> Model:
    """The model; sizes of the mixer that it lacks are made for its width: 2 d channels of Mamba-2, or d of attention."""
    def count(channels: int, head: int, together: int) -> int:
        return max(1, channels // (head * together)) * together
    if "mamba2" not in model.pattern:
        model = replace(model, ssm_heads=count(2 * model.width, model.ssm_head_width, model.groups))
    if "attention" not in model.pattern:
        model = replace(model, heads=count(model.width, model.head_width, model.kv_heads))
    return model


def lengths_to(longest: int) -> list[int]:
    """1K, 4K, ... tokens, and the longest."""
    found = [SHORTEST]
    while found[len(found) - 1] * 4 < longest:
        found.append(found[len(found) - 1] * 4)
    return [length for length in found if length < longest] + [longest]


def describe(model: Model, layout: Layout, longest: int) -> dict:
    """Strategy -> bytes that each rank sends for one layer, forward and backward, for each length of a row."""
    model, ranks, lengths = with_both(model), layout.ranks, lengths_to(longest)
    rows = [told(row, model, ranks, lengths) for row in ROWS if row.table != "5.2"]
    if layout not in [row.layout(ranks) for row in ROWS]:
        rows += [{"layer": kind, "strategy": f"{layout}{', sp' * layout.sp}", "bytes": [
            mean(kind, alone(model, kind), layout, length) for length in lengths]} for kind in ("attention", "mamba2")]
    sizes = {"width": model.width, "heads": model.heads, "kv_heads": model.kv_heads, "head_width": model.head_width,
             "ssm_heads": model.ssm_heads, "ssm_head_width": model.ssm_head_width, "state": model.state, "groups": model.groups,
             "conv": model.conv}
    return {"ranks": ranks, "lengths": lengths, "dtype": DTYPE, "sizes": sizes, "rows": rows, "even": even(model, ranks),
            "once a step": {kind: ITEMSIZE * gradients(alone(model, kind), kind, ranks) for kind in ("attention", "mamba2")}}


def told(row: Row, model: Model, ranks: int, lengths: list[int]) -> dict:
    """A row of the survey's: its formulas, and the bytes; `figure` is ours, in bytes, as the formula has it."""
    model = alone(model, row.kind)
    return {"table": row.table, "layer": row.kind, "strategy": row.strategy, "printed": row.printed,
            "differs": [step.why for step in row.steps], "ours": row.ours, "upward": row.upward,
            "bytes": [mean(row.kind, model, row.layout(ranks), length) for length in lengths],
            "figure": [ITEMSIZE * row.value(Sizes.of(model, 1, length, ITEMSIZE), ranks) for length in lengths]}


def alone(model: Model, kind: str) -> Model:
    """A hybrid as it is; else the layers of one family."""
    both = {"attention", "mamba2"} <= set(model.pattern)
    return model if both else replace(model, pattern=("attention", "mlp") if kind == "attention" else ("mamba2",))


def mean(kind: str, model: Model, layout: Layout, length: int) -> dict[str, float]:
    """Over the ranks, for one row of tokens on each rank of dp."""
    ways = zip(*(layer_sends(kind, model, layout, rank, 1, length, DTYPE) for rank in range(layout.ranks)))
    return {way: sum(sizes) / layout.ranks for way, sizes in zip(("forward", "backward"), ways)}


def even(model: Model, ranks: int) -> float | None:
    """The tokens of a row for which attention around a ring sends what a state costs: s = N z / (2 b k e)."""
    value = {(row.kind, row.strategy): row.value for row in ROWS}
    z = Sizes.of(model, 1, 1, ITEMSIZE)
    ring = value["attention", "CP, ring"](z, ranks)
    return value["mamba2", "CP, gather"](z, ranks) / ring if ring else None


def draw(model: Model, layout: Layout, longest: int) -> str:
    """The bytes; then the formulas."""
    found = describe(model, layout, longest)
    s, stars = found["sizes"], False
    lines = [f"bytes that each of {found['ranks']} ranks sends for one layer, forward: one row of so many tokens, {DTYPE}",
             f"  attention  d={s['width']}, a={s['heads']} query and k={s['kv_heads']} key heads of e={s['head_width']}",
             f"  mamba2     d={s['width']}, m={s['ssm_heads']} heads of p={s['ssm_head_width']} in g={s['groups']} groups, "
             f"state n={s['state']}, w={s['conv']} taps", "",
             f"  {'layer':<9} {'strategy':<16}" + "".join(f"{tokens(length):>12}" for length in found["lengths"])]
    for row in found["rows"]:
        cells = [cell(size["forward"], figure) for size, figure in zip(row["bytes"], row.get("figure", [None] * len(row["bytes"])))]
        stars = stars or any("*" in text for text in cells)
        lines.append(f"  {row['layer']:<9} {row['strategy']:<16}" + "".join(f"{text:>12}" for text in cells))
    lines += ["  * not what the formula says: short sums are doubled, ranks lack heads, the norm has other groups"] if stars else []
    return "\n".join([*lines, "", *formulas(found), "", *summed_up(found)])


def cell(size: float, figure: float | None) -> str:
    """Bytes, with a star where the formula says something else."""
    return units(size) + ("*" if figure is not None and abs(size - figure) > 1e-9 * figure else "")


def units(size: float) -> str:
    """ "28.0 MiB". """
    power = 0
    while size >= 1024 and power + 1 < len(UNITS):
        size, power = size / 1024, power + 1
    return f"{size:.1f} {UNITS[power]}" if size else "0"


def tokens(length: int) -> str:
    """ "4K", or the number. """
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"


def formulas(found: dict) -> list[str]:
    """The survey's beside ours, and why they differ."""
    lines = ["elements that each of N ranks sends, forward; z: a state, its decays, and the conv's last inputs,",
             "b (m (1 + p n) + (w-1) (m p + 2 g n)); h ranks exchange heads, and N/h such groups stand on a ring",
             f"  {'table':<6}{'layer':<10} {'strategy':<17}{'the survey prints':<23}refpar"]
    for row in found["rows"]:
        if "ours" in row:
            lines.append(f"  {row['table'] or '-':<6}{row['layer']:<10} {row['strategy']:<17}{row['printed'] or '-':<23}"
                         f"{row['ours']}")
            notes = [f"- {why}" for why in row["differs"]] + [f"backward: {row['upward']}"] * (row["upward"] != "as much")
            lines += [f"  {'':<34}{note}" for note in notes]
    return lines


def summed_up(found: dict) -> list[str]:
    """What the survey concludes."""
    lines = ["Backward sends as much again, where nothing else is said.",
             "What a state hands on does not grow with the sequence; all else does."]
    if found["even"] is not None:
        lines.append(f"Attention around a ring sends as much as a state at {found['even']:,.0f} tokens, and more beyond.")
    once = found["once a step"]
    return [*lines, "Once a step, dp and cp alike sum a layer's gradients, 2(N-1)/N of its parameters:",
            f"{units(once['attention'])} of attention's, {units(once['mamba2'])} of Mamba-2's."]
