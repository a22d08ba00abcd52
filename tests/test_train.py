"""`refpar train`: it learns, it goes on bitwise, it says what went wrong, and a killed run leaves a good checkpoint."""
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from started import ended, require_mpi, start

from refpar import checkpoint, cli, fit, reading, saves
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.commands import train
from refpar.config import PRESETS, TRAININGS, Layout, Training
from refpar.oracle.equal import assert_equal

TINY = "llama-tiny,blocks=1,width=16,ffn=16,heads=2,kv_heads=1"
MAMBA = "mamba2-tiny,blocks=1,width=16,ssm_heads=2,ssm_head_width=8,state=4"
GPT2 = "gpt2-tiny,blocks=1,width=16,ffn=16,heads=2,kv_heads=2,longest=51,smoothing=0.1,z_loss=0.001,softcap=30"
SMALL = ["--text", "text.txt", "--sequence", "8", "--rows", "5", "--sample", "20", "--save-every", "2", "--micro-batches", "2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    return tmp_path


def arrays(path: Path) -> dict[str, np.ndarray]:
    """Every array of a folder's last checkpoint."""
    return checkpoint.flatten(checkpoint.load(saves.latest(path))[0])


def log(path: Path, event="step") -> list[dict]:
    return [line for line in map(json.loads, (path / "log.jsonl").read_text().splitlines()) if line["event"] == event]


def assert_bitwise(a: dict, b: dict):
    assert a.keys() == b.keys()
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


@pytest.mark.parametrize("model", [TINY, MAMBA, GPT2], ids=["llama", "mamba2", "gpt2"])
def test_it_learns_and_logs(folder, capsys, model):
    assert cli.main(["train", "--model", model, "--mesh", "dp=2", *SMALL, "--steps", "12", "--rate", "0.02", "--out", "run"]) == 0
    out, err = capsys.readouterr()
    steps = log(folder / "run")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert steps[11]["loss"] < steps[0]["loss"] - 0.1 and steps[0]["targets"] == 40
    assert out.splitlines()[-1].endswith("not a preset's own run, so not judged") and "trigram" in out and "sample" in out
    assert "mpiexec -n 2 python -m mpi4py -m refpar" in err
    assert saves.latest(folder / "run").name == "step-000012.npz"


def stopped_after(step, monkeypatch, *words):
    """Run a command whose plug is pulled."""
    def stops(chain, state, *rest):
        if state.step == step:
            raise RuntimeError("the plug was pulled")
        return stepped(chain, state, *rest)
    stepped = fit.train_step
    with monkeypatch.context() as patch:
        patch.setattr(fit, "train_step", stops)
        with pytest.raises(RuntimeError, match="the plug was pulled"):
            cli.main(list(words))


@pytest.mark.parametrize("model, mesh", [(TINY, "dp=2"), (TINY, "dp=2,tp=3"), (MAMBA, "tp=3")])
def test_an_interrupted_run_goes_on_bitwise(folder, monkeypatch, model, mesh):
    """Weights and moments are gathered, saved, and cut again: with three ranks for one key head, or two groups."""
    words = ["train", "--model", f"{model},dropout=0.1", "--mesh", mesh, *SMALL, "--steps", "7", "--out"]
    assert cli.main([*words, "straight"]) == 0
    stopped_after(5, monkeypatch, *words, "broken")
    assert saves.latest(folder / "broken").name == "step-000004.npz"
    assert cli.main([*words, "broken", "--resume"]) == 0
    assert_bitwise(arrays(folder / "broken"), arrays(folder / "straight"))
    resumed = {line["step"]: line["loss"] for line in log(folder / "broken")}
    assert resumed == {line["step"]: line["loss"] for line in log(folder / "straight")}
    assert [line["step"] for line in log(folder / "broken", "begin")] == [0, 4]


MESHES = [(TINY, ["--mesh", "dp=2,tp=3"]), (TINY, ["--mesh", "cp=2,tp=2", "--cp", "zigzag", "--sp"]),
          (MAMBA, ["--mesh", "tp=3", "--sp"]), (MAMBA, ["--mesh", "cp=3,tp=2", "--cp-mamba", "scan"]),
          (GPT2, ["--mesh", "tp=2,dp=2", "--sp", "--order", "tp,dp,cp,pp"]), (GPT2, ["--mesh", "dp=2,cp=4", "--cp", "striped"])]
PLAIN = [*SMALL, "--steps", "5", "--optimizer", "sgd", "--rate", "0.5", "--clip", "0.1", "--dtype", "float64"]      # the plain bound


def assert_equal_runs(a: Path, b: Path):
    """Every array of the last checkpoints, and the loss of each step.  A key's bias has a gradient that cancels to nothing: the scale
    is that of its layer."""
    found, expected = arrays(a), arrays(b)
    assert found.keys() == expected.keys()
    scale = {}
    for name, array in expected.items():
        layer = name.rpartition(".")[0]
        scale[layer] = max(scale.get(layer, 0.0), float(np.abs(array).max()))
    for name, array in found.items():
        assert_equal(array, expected[name], 5 * 40, scale[name.rpartition(".")[0]], name)
    losses = [{line["step"]: line["loss"] for line in log(path)} for path in (a, b)]
    assert losses[0].keys() == losses[1].keys()
    for step, loss in losses[0].items():
        assert_equal(np.float64(loss), np.float64(losses[1][step]), 5 * 40, name=f"the loss of step {step}")


@pytest.mark.parametrize("model, mesh", MESHES)
def test_a_run_may_go_on_with_another_mesh(folder, monkeypatch, model, mesh):
    """Saved on one rank, resumed on a mesh; saved on the mesh, resumed on one rank."""
    words = ["train", "--model", f"{model},dropout=0.1", *PLAIN, "--out"]
    assert cli.main([*words, "straight"]) == 0
    for name, first, then in (("there", [], mesh), ("back", mesh, [])):
        stopped_after(3, monkeypatch, *words, name, *first)
        assert cli.main([*words, name, *then, "--resume"]) == 0
        assert_equal_runs(folder / name, folder / "straight")


@pytest.mark.parametrize("model", [TINY, MAMBA, GPT2], ids=["llama", "mamba2", "gpt2"])
def test_a_run_may_change_its_mesh_on_the_way(folder, capsys, model):
    words = ["train", "--model", model, *PLAIN, "--out"]
    assert cli.main([*words, "straight"]) == 0
    assert cli.main([*words, "switched", "--mesh", "dp=4", "--sp", "--switch", "3:tp=4"]) == 0
    assert "mesh    dp=4, after step 3 tp=4\n" in capsys.readouterr().out
    assert_equal_runs(folder / "switched", folder / "straight")
    assert checkpoint.load(saves.latest(folder / "switched"))[1]["layout"]["tp"] == 4
    begun = log(folder / "switched", "begin")
    assert [(line["step"], line["layout"]["tp"]) for line in begun] == [(0, 1), (3, 4)]
    (folder / "switched" / "step-000005.npz").unlink()
    assert cli.main([*words, "switched", "--mesh", "dp=4", "--sp", "--switch", "3:tp=4", "--resume"]) == 0
    assert_equal_runs(folder / "switched", folder / "straight")


def test_the_last_line_is_the_verdict_of_a_preset_run(folder, capsys, monkeypatch):
    """A preset too small to learn: the control is trained too, and the exit status is 1."""
    monkeypatch.setitem(PRESETS, "dwarf", replace(PRESETS["llama-tiny"], blocks=1, width=16, ffn=16, heads=2, kv_heads=1))
    monkeypatch.setitem(TRAININGS, "dwarf", Training(steps=2, rows=64, sequence=64))
    assert cli.main(["train", "--model", "dwarf", "--out", "run"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("FAILED: held-out loss ") and "with its mixer cut out" in out.splitlines()[-1]
    assert len(log(folder / "run")) == len(log(folder / "run" / "control")) == 2
    assert cli.main(["train", "--model", "dwarf", "--out", "again", "--no-control", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["passed"] and "control" not in told["losses"] and told["losses"]["model"] > told["losses"]["trigram"]


@pytest.mark.parametrize("model, control, passed", [(1.6, 2.0, True), (1.9, 2.0, False), (1.6, 1.5, False), (1.6, None, True)])
def test_the_verdict(model, control, passed):
    losses = {"unigram": 3.3, "bigram": 2.4, "trigram": 1.8, "model": model} | ({"control": control} if control else {})
    job = train.Job(plan=None, start=None, control=None, judged=True, sample=0, json=False, trace=None)
    found, sentence = train.verdict(job, train.Outcome(losses))
    assert found == passed and sentence.startswith("PASSED" if passed else "FAILED")


@pytest.mark.parametrize("mesh, parameter, first", [
    ("dp=2", "0.embedding.table", 0), ("dp=2,tp=2", "0.embedding.table", 1), ("dp=2,tp=2", "1.attention.norm", 0),
    ("tp=4", "1.attention.k", 0)])
def test_replicas_that_drift_apart_are_found(folder, capsys, monkeypatch, mesh, parameter, first):
    """The last rank's moment changes by one bit: one sentence, exit status 1, nothing saved.  The first that holds the same part is
    found across dp, across tp, and in a run of ranks that share a key head."""
    layer, _, name = parameter.rpartition(".")

    def drifts(chain, state, batches, mesh, training):
        state, report = stepped(chain, state, batches, mesh, training)
        if mesh.wire.rank == mesh.wire.size - 1:
            moment = state.m[layer][name].copy()
            moment.flat[0] = np.nextafter(moment.flat[0], 1)
            state.m[layer][name] = moment
        return state, report
    stepped = fit.train_step
    monkeypatch.setattr(fit, "train_step", drifts)
    assert cli.main(["train", "--model", TINY, "--mesh", mesh, *SMALL, "--steps", "4", "--out", "run"]) == 1
    last, ranks = capsys.readouterr().out.splitlines()[-1], Layout.parse(mesh).ranks
    assert f"FAILED: after step 2 m/{parameter} of rank {ranks - 1} is not bitwise that of rank {first}" in last
    assert not list((folder / "run").glob("*.npz"))


@pytest.mark.parametrize("model", [TINY, MAMBA, GPT2], ids=["llama", "mamba2", "gpt2"])
def test_held_out_loss_is_the_same_on_any_mesh(folder, model):
    training = Training(rows=2, sequence=8, dtype="float64")
    plan = fit.Plan(train.parse_model(model), Layout(), training, reading.load("text.txt", 8), folder, 1)

    def program(wire, layout):
        mesh = Mesh(layout, wire)
        return fit.held_out_loss(mesh, plan, fit.fresh(plan, mesh).params)
    layouts = (Layout(), Layout(dp=3), Layout(dp=20), Layout(tp=3), Layout(dp=2, tp=2, sp=True), Layout(dp=2, cp=2), Layout(cp=3))
    found = [ThreadWorld().run(program, layout.ranks, layout) for layout in layouts]
    for loss in (loss for ranks in found for loss in ranks):
        assert_equal(np.float64(loss), np.float64(found[0][0]), plan.text.held_out.size)


def test_threads_and_processes_train_bitwise_alike(folder):
    require_mpi()
    words = ["train", "--model", MAMBA, "--mesh", "tp=2", "--sp", *SMALL, "--steps", "3", "--out"]
    assert cli.main([*words, "threads"]) == 0
    status, out, err = ended(start(folder, *words, "processes", ranks=2))
    assert status == 0 and "not judged" in out, err
    assert_bitwise(arrays(folder / "processes"), arrays(folder / "threads"))


def ranks_of(word: str) -> list[int]:
    """The process ids of the Python processes whose command line has this word."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words and words[0] == sys.executable.encode():
            found.append(int(entry.name))
    return sorted(found)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds its ranks in /proc")
def test_a_killed_rank_ends_the_run_and_leaves_a_good_checkpoint(folder):
    require_mpi()
    out = str(folder / "run")
    process = start(folder, "train", "--model", TINY, *SMALL, "--steps", "100000", "--out", out, ranks=2)
    try:
        limit = time.monotonic() + 40
        while not (folder / "run" / "step-000004.npz").exists():
            assert process.poll() is None and time.monotonic() < limit
            time.sleep(0.01)
        ranks = ranks_of(out)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        killed = time.monotonic()
        status, _, _ = ended(process, 20)
        assert status != 0 and time.monotonic() - killed < 5
    finally:
        process.kill()
    path = saves.latest(out)
    state, meta = checkpoint.load(path, train.parse_model(TINY))
    assert state["step"] % 2 == 0 and meta["layout"]["dp"] == 2
    assert not ranks_of(out)


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_checkpoint_that_cannot_be_written_is_one_sentence(folder, ranks):
    """Where the second one would be written stands a folder, as good as a full disk."""
    if ranks:
        require_mpi()
    (folder / "run" / ".step-000004.npz.unfinished").mkdir(parents=True)
    status, out, err = ended(start(folder, "train", "--model", TINY, "--mesh", "dp=2", *SMALL, "--steps", "6", "--out", "run", ranks=ranks))
    assert status == 1 and "Traceback" not in out + err
    assert err.count("FAILED: writing into run: Is a directory; the last good checkpoint is in run\n") == 1
    assert saves.latest(folder / "run").name == "step-000002.npz"


def test_a_full_disk_before_the_first_checkpoint(folder, monkeypatch, capsys):
    """One sentence; and what is left is in nobody's way."""
    def full(_):
        raise OSError(28, "No space left on device")
    words = ["train", "--model", TINY, *SMALL, "--steps", "2", "--out", "run"]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", full)
        assert cli.main(words) == 1
    assert "FAILED: writing into run: No space left on device; run holds no checkpoint" in capsys.readouterr().err
    assert cli.main(words) == 0 and cli.main(words) == 2
