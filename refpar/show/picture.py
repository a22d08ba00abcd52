"""A schedule as a picture: a row for each rank, a bar for each op, coloured by its kind; the two ops of a pair lie one above the other.

Needs the extra `plot` (matplotlib).
"""
from __future__ import annotations

from pathlib import Path

from refpar.comm.wire import Failed
from refpar.schedules.simulate import Timeline

COLOURS = {"F": "#6ea6d6", "B": "#e39a6c", "W": "#9ccb8a", "BW": "#d9806a"}


def check(path: Path):
    """ValueError, one sentence, where no picture can be written there: no matplotlib, an unknown format, no such folder."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"--plot {path} must end with .{', .'.join(sorted(known))}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path} must be a file in a folder that is there")


def save(line: Timeline, path: Path):
    """Write the picture; its format follows the name."""
    from matplotlib.figure import Figure
    ranks = len(line.times)
    figure = Figure(figsize=(10, 0.6 + 0.45 * ranks))
    axes = figure.add_subplot()
    for rank, (slots, times) in enumerate(zip(line.schedule.rows, line.times)):
        for slot, (start, end) in zip(slots, times):
            for number, op in enumerate(slot):
                row, height = rank + 0.8 * ((number + 0.5) / len(slot) - 0.5), 0.8 / len(slot)
                axes.barh(row, float(end - start), height, float(start), color=COLOURS[op.kind], edgecolor="white")
                axes.text(float(start + end) / 2, row, str(op.micro), ha="center", va="center", fontsize=6)
    axes.set(xlim=(0, float(line.makespan)), yticks=range(ranks), yticklabels=[f"rank {rank}" for rank in range(ranks)], xlabel="time",
             title=f"{line.schedule.name}: makespan {float(line.makespan):g}, bubble {float(line.bubble):g}")
    for kind in sorted({op.kind for row in line.schedule.rows for slot in row for op in slot}, key=list(COLOURS).index):
        axes.bar(0, 0, color=COLOURS[kind], label=kind)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.invert_yaxis()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise Failed(f"the picture {path} cannot be written: {error.strerror}") from error
