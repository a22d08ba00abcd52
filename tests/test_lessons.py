"""The lessons: on threads and on processes, step by step, with a reader's own function, with a fault, and with bad input."""
import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pool.mpipool import ENVIRONMENT, mpiexec

from refpar.nn.ops import rmsnorm_backward
from refpar.oracle.faults import NORMALISATION

ROOT = Path(__file__).parents[1]
LESSONS = {"00": ROOT / "lessons" / "00_ranks_and_messages.py", "01": ROOT / "lessons" / "01_collectives_from_nothing.py",
           "02": ROOT / "lessons" / "02_backward_by_hand.py", "02_scans": ROOT / "lessons" / "02_scans.py",
           "03": ROOT / "lessons" / "03_data_parallel.py", "04": ROOT / "lessons" / "04_tensor_parallel.py",
           "05": ROOT / "lessons" / "05_sequence_and_vocabulary.py", "06": ROOT / "lessons" / "06_context_parallel.py",
           "07": ROOT / "lessons" / "07_mamba_parallel.py", "08": ROOT / "lessons" / "08_pipelines.py",
           "09": ROOT / "lessons" / "09_zero_bubble.py", "12": ROOT / "lessons" / "12_all_axes.py"}
ANSWERS = {"00": "00_broadcast.py", "01": "01_all_reduce.py", "02": "02_rmsnorm_backward.py",
           "02_scans": "02_recurrence_backward.py", "03": "03_reduce_gradients.py", "04": "04_by_rows.py", "05": "05_merge_over.py",
           "06": "06_merge.py", "07": "07_merge.py", "08": "08_one_f_one_b.py", "09": "09_zb_h1.py", "12": "12_summed_axes.py"}

spec = importlib.util.spec_from_file_location("record", ROOT / "docs" / "record.py")
record = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record)


@pytest.fixture
def lesson(monkeypatch, capsys):
    """Run a lesson in this process, on threads: exit status, stdout, stderr."""
    def run(number: str, *options):
        monkeypatch.setattr(sys, "argv", [str(LESSONS[number]), *map(str, options)])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(LESSONS[number]), run_name="__main__")
        out, err = capsys.readouterr()
        return end.value.code, out, err
    return run


def on_processes(number: str, *options, ranks=4, module=True):
    """Run a lesson by mpiexec."""
    how = ["-m", "mpi4py"] if module else []
    command = [mpiexec(), "-n", str(ranks), sys.executable, *how, LESSONS[number], *map(str, options)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False,
                         env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)})
    return run.returncode, run.stdout, run.stderr


def verdict(out: str) -> str:
    """The one verdict line, which is the last."""
    found = [line for line in out.splitlines() if line.startswith("VERDICT")]
    assert len(found) == 1 and out.splitlines().pop() == found[0]
    return found[0]


def body(text: str) -> str:
    """Without the lines that name the command and the world."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(("$", "world:")))


@pytest.mark.parametrize("number", LESSONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_threads(lesson, number, ranks):
    status, out, err = lesson(number, "--ranks", ranks)
    assert (status, err) == (0, "") and "green" in verdict(out) and "WRONG" not in out


@pytest.mark.parametrize("number", LESSONS)
@pytest.mark.parametrize("module", [True, False])
def test_processes_print_what_threads_print(mpi, lesson, number, module):
    status, out, _ = on_processes(number, module=module)
    threads = (record.RUNS / f"lesson{number}.txt").read_text()
    if "world: 4 ranks" not in threads:
        threads = lesson(number, "--ranks", 4)[1]
    assert status == 0
    assert record.difference(body(threads), body(out)) is None


@pytest.mark.parametrize("number", LESSONS)
def test_show_adds_a_line_for_each_message(lesson, number):
    _, plain, _ = lesson(number)
    status, shown, _ = lesson(number, "--show")
    steps = [line for line in shown.splitlines() if line.startswith(("  round", "  up"))]
    assert status == 0 and [line for line in shown.splitlines() if line not in steps] == plain.splitlines()
    assert len(steps) == {"00": 3 + 3 + 3, "01": 6 + 12 + 12, "02": 4 + 4, "02_scans": 3 + 3, "03": 3 * 8,
                          "04": 28, "05": 16, "06": 36, "07": 64, "08": 48, "09": 34, "12": 2080}[number]
    assert all(" -> rank " in line and "bytes" in line or "hands down" in line for line in steps)


@pytest.mark.parametrize("number", ANSWERS)
def test_mine_right(lesson, number):
    status, out, _ = lesson(number, "--mine", ROOT / "docs" / "answers" / ANSWERS[number])
    assert status == 0 and "judged by the properties" in out and "green" in verdict(out)


WRONG = {
    "00": "def broadcast(x, axis, root=0):\n    return x\n",
    "01": "def all_reduce(x, axis):\n    return x * axis.size\n",
    "02": "def rmsnorm_backward(dy, saved, w):\n    y = saved['x'] * saved['scale']\n"
          "    return dy * w * saved['scale'], (dy * y).sum(0)\n",
    "02_scans": "def recurrence_backward(dh, a, h, before, dafter):\n    return dh * h, dh, dafter\n",
    "03": "def reduce_gradients(grads, chain, mesh):\n    return grads\n",
    "04": "def by_rows(x, w, axis):\n    return x @ w * axis.size\n",
    "05": "def merge_over(spread, axis):\n    return spread\n",
    "06": "def merge(a, b):\n    return a\n",
    "07": "def merge(first, second):\n    return second\n",
    "08": "from refpar.schedules.generate import gpipe\n\ndef one_f_one_b(s):\n    return gpipe(s)\n",
    "09": "from refpar.schedules.generate import one_f_one_b\n\ndef zb_h1(s):\n    return one_f_one_b(s)\n",
    "12": "def summed_axes(dims, inside, sequence_parallel=False):\n    return ('dp', 'cp')\n"}
CRASH = {
    "00": "def broadcast(x, axis, root=0):\n    return x.nothing\n",
    "01": "import numpy as np\n\ndef all_reduce(x, axis):\n    axis.recv(np.empty(1), axis.size)\n",
    "02": "def rmsnorm_backward(dy, saved, w):\n    return dy.nothing\n",
    "02_scans": "def recurrence_backward(dh, a, h, before=0.0, dafter=0.0):\n    return dh.nothing\n",
    "03": "def reduce_gradients(grads, chain, mesh):\n    return grads['nothing']\n",
    "04": "def by_rows(x, w, axis):\n    return x.nothing\n",
    "05": "def merge_over(spread, axis):\n    return spread.nothing\n",
    "06": "def merge(a, b):\n    return a.nothing\n",
    "07": "def merge(first, second):\n    return first.nothing\n",
    "08": "def one_f_one_b(s):\n    return s.nothing\n",
    "09": "def zb_h1(s):\n    return s.nothing\n",
    "12": "def summed_axes(dims, inside, sequence_parallel=False):\n    return dims.nothing\n"}


@pytest.mark.parametrize("number", ANSWERS)
def test_mine_wrong(lesson, tmp_path, number):
    (tmp_path / "mine.py").write_text(WRONG[number])
    status, out, _ = lesson(number, "--mine", tmp_path / "mine.py")
    assert status == 1 and "red" in verdict(out)


@pytest.mark.parametrize("number", ANSWERS)
def test_mine_crashing(lesson, tmp_path, number):
    (tmp_path / "mine.py").write_text(CRASH[number])
    status, out, err = lesson(number, "--mine", tmp_path / "mine.py")
    assert status == 1 and "Traceback" not in out + err
    assert "VERDICT: red. mine.py: " in verdict(out) and f"mine.py, line {CRASH[number].count(chr(10))}, in " in out


def returning(number: str, value: str) -> str:
    """A file whose function gives back `value`, whatever it is given."""
    (definition,) = [line for line in CRASH[number].splitlines() if line.startswith("def")]
    return f"import numpy as np\n\n{definition}\n    return {value}\n"


@pytest.mark.parametrize("number", ANSWERS)
@pytest.mark.parametrize("value, words", [("None", "returned None"), ("7", "returned a number"),
                                          ("np.zeros(99)", "returned an array of shape [99]"), ("(1, {})", "returned 2 values"),
                                          ("{'nothing': 1}", "returned a dict")])
def test_mine_of_another_form(lesson, tmp_path, number, value, words):
    if number in ("02", "06", "07") and value == "(1, {})":
        words = "returned a number, and must return an array of shape"
    if number == "12" and value == "(1, {})":
        words = "returned a number, and must return a word"
    (tmp_path / "mine.py").write_text(returning(number, value))
    status, out, err = lesson(number, "--mine", tmp_path / "mine.py")
    assert (status, err) == (1, "") and words in verdict(out) and "and must return" in verdict(out)
    assert "on rank" in verdict(out) or number in ("09", "12")          # whose functions are first called before there are ranks


def test_mine_is_named_by_a_path_from_here(lesson, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CRASH["00"])
    status, out, _ = lesson("00", "--mine", "mine.py")
    assert status == 1 and "AttributeError: 'numpy.ndarray' object has no attribute 'nothing'" in verdict(out)
    assert "mine.py, line 2, in broadcast:  return x.nothing" in out


def test_mine_of_other_arguments(lesson, tmp_path):
    (tmp_path / "mine.py").write_text("def all_reduce(x):\n    return x\n")
    status, _, err = lesson("01", "--mine", tmp_path / "mine.py")
    assert status == 2 and err.endswith("mine.py takes (x), and must take (x, axis)\n")


def test_mine_waiting_for_ever_is_named(lesson, tmp_path):
    (tmp_path / "mine.py").write_text("import numpy as np\n\ndef all_reduce(x, axis):\n"
                                      "    axis.recv(np.empty_like(x), (axis.index - 1) % axis.size)\n")
    status, out, _ = lesson("01", "--mine", tmp_path / "mine.py")
    assert status == 1 and "deadlock" in verdict(out) and "mine.py line 4, in all_reduce" in out and "0 -> 3 -> 2 -> 1 -> 0" in out


def test_mine_that_sends_too_much_is_told_so(lesson, tmp_path):
    (tmp_path / "mine.py").write_text("from refpar.comm.trees import broadcast, reduce\n\ndef all_reduce(x, axis):\n"
                                      "    total = reduce(x, axis)\n    return broadcast(x if total is None else total, axis)\n")
    status, out, _ = lesson("01", "--mine", tmp_path / "mine.py")
    assert status == 1 and "messages (bytes) sent by each rank" in verdict(out) and "bitwise_repeatable holds" in out


@pytest.mark.parametrize("own, seen_by", [("np.exp(side.lse)", "ring of kv, exp(score) beyond all numbers"),
                                          ("np.exp(side.lse - top)", "ring of q ")])
def test_a_merge_that_overflows_or_forgets_the_empty_side(lesson, tmp_path, own, seen_by):
    right = (ROOT / "docs" / "answers" / ANSWERS["06"]).read_text()
    wrong = right.replace("np.exp(side.lse - shift)", own).replace("    top =", "    np.seterr(all='ignore')\n    top =")
    (tmp_path / "mine.py").write_text(wrong)
    with np.errstate():
        status, out, _ = lesson("06", "--mine", tmp_path / "mine.py")
    assert wrong != right and status == 1 and f"  WRONG {seen_by}" in out


@pytest.mark.parametrize("text, words", [(None, "green"), (CRASH["01"], "mine.py, line 4, in all_reduce"),
                                         (returning("01", "None"), "all_reduce returned None, and must return an array")])
def test_mine_on_processes(mpi, tmp_path, text, words):
    path = ROOT / "docs" / "answers" / ANSWERS["01"]
    if text:
        path = tmp_path / "mine.py"
        path.write_text(text)
    ended, out, err = on_processes("01", "--mine", path, ranks=3)
    assert ended == (1 if text else 0) and words in out and verdict(out), err


@pytest.mark.parametrize("number, fault", [*(("03", fault.name) for fault in NORMALISATION), ("02", "no-document-mask"),
                                           ("02", "backward-of-one-group"), ("06", "merge-overflows"),
                                           ("06", "nothing-minus-nothing"), ("06", "copies-not-added"),
                                           ("07", "halo-of-the-neighbour"), ("07", "groups-dealt-out-over-ranks")])
def test_a_fault_ends_red(lesson, number, fault):
    status, out, _ = lesson(number, "--fault", fault)
    assert status == 1 and "WRONG" in out and "red" in verdict(out) and "#" in out


@pytest.mark.parametrize("number, fault", [("02", "no-document-mask"), ("03", "local-count"),
                                           ("04", "bias-on-every-rank"), ("05", "largest-logit-of-a-rank"), ("06", "local-lse"),
                                           ("07", "halo-gradient-dropped"), ("08", "normalised-after-backward"),
                                           ("09", "put-off-and-not-scaled")])
def test_a_fault_on_processes(mpi, number, fault):
    status, out, _ = on_processes(number, "--fault", fault)
    assert status == 1
    assert record.difference(body((record.RUNS / f"lesson{number}_fault.txt").read_text()), body(out)) is None


def test_a_missing_mask_is_seen_by_isolation_alone(lesson):
    _, out, _ = lesson("02", "--fault", "no-document-mask")
    wrong = [line for line in out.splitlines() if line.startswith("  WRONG")]
    assert wrong == ["  WRONG llama: the second document keeps its bits"]


def test_mine_that_writes_into_what_it_is_given_is_told_so(lesson, tmp_path):
    right = (ROOT / "docs" / "answers" / ANSWERS["02"]).read_text()
    (tmp_path / "mine.py").write_text(right.replace("    return dx", "    saved['x'][:] = 0\n    return dx"))
    status, out, _ = lesson("02", "--mine", tmp_path / "mine.py")
    assert status == 1 and "WRONG what rmsnorm_backward was given is as it was" in out and "written into" in out


def test_the_answers_of_chapter_2():
    """The numbers that exercises 1 and 2 print."""
    text = (ROOT / "docs" / "02_backward_by_hand.md").read_text()
    x, dy, scale = np.array([3.0, 4.0]), np.array([1.0, 0.0]), np.array([12.5**-0.5])
    dx, _ = rmsnorm_backward(dy, {"x": x, "scale": scale}, np.ones(2))
    assert f"({dx[0]:.3f}, {dx[1]:.4f})" in text and f"({scale[0]:.4f}, 0)" in text and abs(dx @ x) < 1e-15
    backward = runpy.run_path(str(LESSONS["02_scans"]))["recurrence_backward"]
    for a in ([0.5] * 4, [0.5, 0.5, 0, 0.5]):
        _, db, dbefore = backward(np.ones(4), np.array(a), np.ones(4))
        assert f"db = ({', '.join(f'{n:g}' for n in db)})`" in text and f"{dbefore:g}`" in text


@pytest.mark.parametrize("number, options, words", [
    ("00", ["--ranks", "0"], "at least 1"), ("00", ["--ranks", "65"], "at most 64"),
    ("00", ["--ranks", "two"], "whole number"), ("00", ["--steps"], "--steps"),
    ("01", ["--mine", "nowhere.py"], "no file nowhere.py"), ("01", ["--mine", str(LESSONS["00"].with_name("text.txt"))], "Python"),
    ("01", ["--mine", str(LESSONS["00"])], "must define a function all_reduce"), ("03", ["--fault", "none"], "mean-of-means")])
def test_bad_input(lesson, number, options, words):
    status, out, err = lesson(number, *options)
    assert (status, out, err.count("\n")) == (2, "", 1) and words in err


def test_bad_input_on_processes(mpi):
    status, out, err = on_processes("00", "--ranks", 3, ranks=2)
    assert (status, out) == (2, "") and err.count("mpiexec has started 2 processes") == 1


def test_help(lesson):
    status, out, _ = lesson("03", "--help")
    assert status == 0 and "--mine FILE" in out and "mean-of-means" in out and "What:" in out


def test_recorded_runs():
    """The book shows what the programs print."""
    for name in record.COMMANDS:
        found = record.difference((record.RUNS / name).read_text(), record.recorded(name))
        assert found is None, f"docs/runs/{name} differs in {found}; `python docs/record.py` records it anew"
    assert {path.name for path in record.RUNS.iterdir()} == set(record.COMMANDS)


@pytest.mark.parametrize("old, new, same", [
    ("loss 5.547  on 4", "loss 5.548 on 4", True), ("loss 5.547", "loss 5.549", False), ("4 ranks", "5 ranks", False),
    ("x 1.20e-05", "x 1.21e-05", True), ("x 1.20e-05", "x 1.22e-05", False), ("ok", "WRONG", False), ("x -0.10", "x 0.10", False)])
def test_runs_agree_in_words_and_within_the_printed_digits(old, new, same):
    assert record.agree(old, new) is same


def test_a_closed_pipe_is_silence():
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run([sys.executable, LESSONS["01"], "--show"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
                         env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=60)
    os.close(writer)
    assert (run.returncode, run.stderr) == (1, "")


def test_ctrl_c_is_one_line(monkeypatch, lesson):
    monkeypatch.setattr("refpar.lesson.Page.run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    status, _, err = lesson("00")
    assert (status, err) == (130, "interrupted\n")
