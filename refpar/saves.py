"""The folder of a run: its checkpoints by step, of which the newest are kept."""
from __future__ import annotations

import os
import re
from pathlib import Path

from refpar.checkpoint import UNFINISHED, save


def name_of(step: int) -> str:
    """The file name of a step's checkpoint."""
    return f"step-{step:06d}.npz"


def _steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are in the folder, rising."""
    found = (re.fullmatch(r"step-(\d{6,})\.npz", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def latest(folder: str | Path) -> Path:
    """The last checkpoint of a folder, by its step; ValueError where there is none."""
    folder = Path(folder)
    steps = _steps(folder) if folder.is_dir() else []
    if not steps:
        raise ValueError(f"checkpoint: {folder} has no checkpoint, a file such as {name_of(123)}")
    return folder / name_of(steps[-1])


def prepare(folder: str | Path) -> Path:
    """Make the folder of a run's checkpoints; OSError, one sentence, where it cannot hold any."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {folder} cannot be made ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(f"the folder {folder} cannot be written to")
    return folder


def save_step(folder: str | Path, state: dict, meta: dict, keep: int = 2) -> Path:
    """Save under the name of the state's step; then remove all but the `keep` newest, and what a killed save left behind."""
    folder = Path(folder)
    path = folder / name_of(state["step"])
    save(path, state, meta)
    older = [step for step in _steps(folder) if step <= state["step"]]
    for step in older[:max(len(older) - keep, 0)]:
        (folder / name_of(step)).unlink(missing_ok=True)
    for left in folder.glob(f".step-*{UNFINISHED}"):
        left.unlink(missing_ok=True)
    return path
