"""Checkpoints: everything that a run needs to go on bitwise, in one file that is whole or not there.

A file is a zip of numpy arrays (what numpy calls .npz, readable without refpar), each with a checksum:

    params/3.attention.q, m/3.attention.q, v/3.attention.q      a parameter and AdamW's two moments, under the names of the code
    step                                                        steps done
    meta                                                        JSON: format, version, model, layout, training, dtype, nest

It is written under another name beside its place, forced to the disk, and renamed: a run that is killed in the middle of a save
leaves the file that was there before.  A file is judged whole (readable, of this model, every name and shape) before anything of
it is handed out.  Randomness is keyed by the step, so no generator's state needs saving.
"""
from __future__ import annotations

import dataclasses
import json
import os
import zipfile
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np

import refpar
from refpar.config import Layout, Model, Training

FORMAT, VERSION = "refpar checkpoint", 1
UNFINISHED = ".unfinished"
_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, NotImplementedError, RuntimeError, OSError)


def describe(model: Model, layout: Layout, training: Training) -> dict:
    """The meta of a checkpoint: what was run, and by which version."""
    return {"format": FORMAT, "version": VERSION, "refpar": refpar.__version__, "dtype": training.dtype,
            "model": _plain(model), "layout": _plain(layout), "training": _plain(training)}


def _plain(config) -> dict:
    """The fields of a config as JSON gives them back: tuples are lists there."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def flatten(state: dict) -> dict[str, np.ndarray]:
    """{"params": {"3.attention": {"q": array}}, "step": 7} -> {"params/3.attention.q": array, "step": array of no dims}."""
    flat = {}
    for kind, content in state.items():
        if isinstance(content, dict):
            flat |= {f"{kind}/{layer}.{name}": array for layer, weights in content.items() for name, array in weights.items()}
        else:
            flat[kind] = np.asarray(content)
    return flat


def nest_of(state: dict) -> dict[str, list[str]]:
    """The layers of each kind: those without parameters leave no name in the flat form."""
    return {kind: list(content) for kind, content in state.items() if isinstance(content, dict)}


def unflatten(flat: dict[str, np.ndarray], nest: dict[str, list[str]]) -> dict:
    """The inverse of flatten.  A layer's name has dots in it and a parameter's has none."""
    state = {kind: {layer: {} for layer in layers} for kind, layers in nest.items()}
    for key, array in flat.items():
        kind, slash, full = key.partition("/")
        if slash:
            layer, _, name = full.rpartition(".")
            state[kind][layer][name] = array
        else:
            state[kind] = array.item()
    return state


def save(path: str | Path, state: dict, meta: dict):
    """Write a checkpoint: whole, or nothing at all and OSError."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}{UNFINISHED}")
    text = np.frombuffer(json.dumps(meta | {"nest": nest_of(state)}).encode(), np.uint8)
    try:
        with open(unfinished, "wb") as file:
            np.savez(file, allow_pickle=False, **flatten(state), meta=text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _fsync_folder(path.parent)


def _fsync_folder(folder: Path):
    """Force the folder's list of names to the disk, where the system lets a folder be opened."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def load(path: str | Path, model: Model | None = None, like: dict | None = None) -> tuple[dict, dict]:
    """Read a checkpoint -> (state, meta), or ValueError with the reason and nothing changed.

    model: the model that it must be of.  like: a state whose names, shapes and dtypes it must have.  Alone, as it stands.
    """
    path = Path(path)
    flat = _arrays(path)
    meta = _meta(path, flat.pop("meta", None))
    if model is not None:
        for field, here in _plain(model).items():
            there = meta["model"].get(field)
            if there != here:
                raise ValueError(f"checkpoint: {path} is of another model: {field} is {there} there and {here} here")
    if like is not None:
        _check_like(path, flat, flatten(like))
    return unflatten(flat, meta["nest"]), meta


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of the file, its checksum verified."""
    if path.is_dir():
        raise ValueError(f"checkpoint: {path} is a directory, and must be a file such as step-000123.npz")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"checkpoint: the file {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"checkpoint: the file {path} cannot be read ({error.strerror})") from None
    if content[:2] not in (b"PK", b""):
        raise ValueError(f"checkpoint: {path} is not a refpar checkpoint (it begins with {content[:4]!r}, and must with b'PK')")
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            return {name.removesuffix(".npy"): np.load(BytesIO(archive.read(name)), allow_pickle=False)
                    for name in archive.namelist()}
    except _UNREADABLE as error:
        raise ValueError(f"checkpoint: {path} is cut short or damaged "
                         f"({len(content)} bytes; {str(error) or type(error).__name__})") from None


def _meta(path: Path, text: np.ndarray | None) -> dict:
    try:
        meta = json.loads(text.tobytes())
        is_ours = meta["format"] == FORMAT and all(isinstance(meta[key], dict) for key in ("model", "nest"))
    except (AttributeError, ValueError, KeyError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError(f"checkpoint: {path} is not a refpar checkpoint (it says nothing of a model)")
    if meta["version"] != VERSION:
        raise ValueError(f"checkpoint: {path} has version {meta['version']} of the format, and this refpar reads version {VERSION}")
    return meta


def _check_like(path: Path, there: dict[str, np.ndarray], here: dict[str, np.ndarray]):
    """The same names, shapes and dtypes, or one sentence on the first that differs."""
    for name in sorted(here.keys() - there.keys()):
        raise ValueError(f"checkpoint: {path} lacks {name}; it has {len(there)} arrays where this run has {len(here)}")
    for name in sorted(there.keys() - here.keys()):
        raise ValueError(f"checkpoint: {path} has {name}, which this run has not; "
                         f"it has {len(there)} arrays where this run has {len(here)}")
    for name, array in here.items():
        for what in ("dtype", "shape"):
            a, b = getattr(there[name], what), getattr(array, what)
            if a != b:
                raise ValueError(f"checkpoint: {path} has {what} {a} for {name}, and this run has {b}")
