"""The progress line and the log."""
import io
import json

import numpy as np
import pytest

from refpar.progress import Log, Progress, spell_time


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def run(out, steps=10, seconds=2.0, every=5.0):
    clock = Clock()
    progress = Progress(steps, out=out, every=every, clock=clock)
    for step in range(1, steps + 1):
        clock.now += seconds
        progress.update(step, 10 / step, 1000)
    progress.close()
    progress.close()
    return out.getvalue()


def test_a_terminal_line_is_rewritten():
    said = run(Terminal())
    assert said.count("\r") == 10 and said.count("\n") == 1 and said.endswith("\n")
    assert "step 4/10  loss 2.5000  500 tokens/s  12 s left" in said
    lines = said.strip("\n").split("\r")[1:]
    assert all(len(b) >= len(a.rstrip()) for a, b in zip(lines, lines[1:]))     # nothing of the line before sticks out


def test_a_file_gets_a_line_every_few_seconds():
    lines = run(io.StringIO()).splitlines()
    assert [line.split()[1] for line in lines] == ["3/10", "6/10", "9/10", "10/10"]
    assert lines[-1].endswith("0 s left")


def test_speed_counts_from_where_the_run_went_on():
    clock, out = Clock(), io.StringIO()
    progress = Progress(100, done=50, out=out, every=0, clock=clock)
    clock.now += 1
    progress.update(51, 1.0, 10)
    assert "10 tokens/s  49 s left" in out.getvalue()


def test_times_are_spelled():
    assert [spell_time(s) for s in (0.4, 59.4, 125, 11_220)] == ["0 s", "59 s", "2 min 05 s", "3 h 07 min"]


def test_log_lines_are_whole_and_goes_on(tmp_path):
    path = tmp_path / "log"
    log = Log(path)
    log.write(step=np.int64(1), loss=np.float32(0.5), name="a")
    log.write(step=2, loss=float("nan"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]        # before it is closed
    assert lines == [{"step": 1, "loss": 0.5, "name": "a"}, {"step": 2, "loss": "nan"}]
    log.close()
    with open(path, "a") as file:
        file.write('{"step": 3, "lo')
    log = Log(path)
    log.write(step=3)
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    with pytest.raises(OSError, match="cannot be written"):
        Log(tmp_path / "none" / "log")
