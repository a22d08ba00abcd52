"""Checkpoints: bitwise back, refused in one sentence, and never half written, not even by kill -9."""
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from refpar import checkpoint, saves
from refpar.config import PRESETS, Layout, Training

MODEL = PRESETS["llama-tiny"]
META = checkpoint.describe(MODEL, Layout(dp=2), Training())


def made(step=3, dtype=np.float32, size=5):
    """A state of awkward content: a layer without parameters, an empty array, NaN, infinities, -0 and the smallest numbers."""
    random = np.random.default_rng(step)
    hard = np.array([np.nan, np.inf, -np.inf, -0.0, np.finfo(dtype).tiny / 8], dtype)

    def weights():
        return {"0.embedding": {"table": random.standard_normal((size, 3)).astype(dtype)}, "1.attention": {},
                "2.mlp": {"gate_up": hard, "down": np.zeros((0, 4), dtype)}}
    return {"params": weights(), "m": weights(), "v": weights(), "step": step}


def bits(state):
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in checkpoint.flatten(state).items()}


def test_everything_comes_back_bitwise(tmp_path):
    path, state = tmp_path / "run.npz", made(dtype=np.float64)
    checkpoint.save(path, state, META)
    back, meta = checkpoint.load(path, MODEL, like=made(step=0, dtype=np.float64))
    assert bits(back) == bits(state) and checkpoint.nest_of(back) == checkpoint.nest_of(state)
    assert back["step"] == 3 and type(back["step"]) is int
    assert meta["layout"]["dp"] == 2 and meta["refpar"] and meta["dtype"] == "float32"
    assert [child.name for child in tmp_path.iterdir()] == ["run.npz"]


def refuse(sentence, *args, **named):
    with pytest.raises(ValueError, match=sentence) as caught:
        checkpoint.load(*args, **named)
    assert str(caught.value).startswith("checkpoint: ") and "\n" not in str(caught.value)


def test_refused_files(tmp_path):
    path = tmp_path / "run.npz"
    refuse("does not exist", path)
    refuse("is a directory", tmp_path)
    path.write_bytes(b"once upon a time")
    refuse("is not a refpar checkpoint", path)
    np.savez(path, a=np.zeros(3))
    refuse("is not a refpar checkpoint", path)
    checkpoint.save(path, made(), META | {"version": 7})
    refuse("has version 7 .* reads version 1", path)


def test_every_cut_and_flipped_bit_is_noticed(tmp_path):
    path, broken = tmp_path / "run.npz", tmp_path / "broken.npz"
    checkpoint.save(path, made(), META)
    whole = path.read_bytes()
    expected = bits(made())
    random = np.random.default_rng(0)
    for length in [0, 1, 2, len(whole) - 1, *random.integers(0, len(whole), 30)]:
        broken.write_bytes(whole[:length])
        refuse("is cut short or damaged|is not a refpar checkpoint", broken, MODEL)
    for place in random.integers(0, len(whole), 300):
        wrong = bytearray(whole)
        wrong[place] ^= 1 << int(random.integers(8))
        broken.write_bytes(wrong)
        try:
            back, _ = checkpoint.load(broken, MODEL, like=made())
        except ValueError as error:
            assert str(error).startswith("checkpoint: ")
        else:
            assert bits(back) == expected                           # a bit without meaning: a date, a flag


def test_another_model_is_named_by_its_first_field(tmp_path):
    path = tmp_path / "run.npz"
    checkpoint.save(path, made(), META)
    refuse("another model: width is 64 there and 65 here", path, dataclasses.replace(MODEL, width=65))
    refuse("another model: pattern is", path, PRESETS["mamba2-tiny"])


def test_names_shapes_and_dtypes_are_those_of_the_run(tmp_path):
    path = tmp_path / "run.npz"
    checkpoint.save(path, made(), META)
    refuse("dtype float32 for params/0.embedding.table, and this run has float64", path, like=made(dtype=np.float64))
    refuse(r"shape \(5, 3\) for params/0.embedding.table, and this run has \(6, 3\)", path, like=made(size=6))
    less, more = made(), made()
    del less["v"]["2.mlp"]["down"]
    more["m"]["1.attention"]["q"] = np.zeros(3)
    refuse("has v/2.mlp.down, which this run has not; it has 10 arrays where this run has 9", path, like=less)
    refuse("lacks m/1.attention.q; it has 10 arrays where this run has 11", path, like=more)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_save_that_fails_changes_nothing(tmp_path, monkeypatch, function):
    path = tmp_path / "run.npz"
    checkpoint.save(path, made(1), META)

    def full(*args):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, function, full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(path, made(2), META)
    assert [child.name for child in tmp_path.iterdir()] == ["run.npz"]
    assert checkpoint.load(path)[0]["step"] == 1


def test_the_newest_are_kept_and_the_latest_is_found(tmp_path):
    folder = saves.prepare(tmp_path / "a" / "b")
    with pytest.raises(ValueError, match="has no checkpoint"):
        saves.latest(folder)
    (folder / ".step-000009.npz.unfinished").write_bytes(b"left by a killed run")
    for step in (8, 9, 1_000_000, 1_000_001):
        assert saves.save_step(folder, made(step), META) == saves.latest(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1000000.npz", "step-1000001.npz"]
    assert checkpoint.load(saves.latest(folder))[0]["step"] == 1_000_001
    with pytest.raises(OSError, match="cannot be made"):
        saves.prepare(saves.latest(folder) / "below")


SAVER = """
import sys, numpy as np
from refpar import checkpoint, saves
from refpar.config import PRESETS, Layout, Training
meta = checkpoint.describe(PRESETS["llama-tiny"], Layout(), Training())
for step in range(int(sys.argv[2]), 10**6):
    weights = {f"{i}.mlp": {"down": np.full((200, 500), step, np.float32)} for i in range(6)}
    saves.save_step(sys.argv[1], {"params": weights, "step": step}, meta)
    print(step, flush=True)
"""


def test_a_killed_run_leaves_the_last_good_one(tmp_path):
    start = 0
    for kill in range(5):
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True,
                                   cwd=Path(checkpoint.__file__).parents[1])
        said = int(process.stdout.readline())                       # at least one save is done
        time.sleep(0.004 + 0.003 * kill)                            # and another is under way
        process.kill()
        said = max([said, *(int(line) for line in process.communicate()[0].split())])
        state, _ = checkpoint.load(saves.latest(tmp_path))
        assert state["step"] in (said, said + 1)
        assert all((weights["down"] == state["step"]).all() for weights in state["params"].values())
        start = state["step"] + 1
