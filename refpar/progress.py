"""What a run says of itself: a progress line for people, and a log of JSON lines for programs."""
from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np

WINDOW = 20                 # updates over which the speed is taken


def spell_time(seconds: float) -> str:
    """Seconds as a person says them: 7 s, 2 min 05 s, 3 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Progress:
    """Step, loss, tokens per second, time left: one line, rewritten in place on a terminal, else printed every few seconds.

    done: steps done before this run.  clock: seconds, of any beginning.
    """

    def __init__(self, steps: int, done: int = 0, out=None, every: float = 5.0, clock=time.monotonic):
        self.steps, self.out, self.every, self.clock = steps, out or sys.stdout, every, clock
        self.terminal = self.out.isatty()
        self.marks = deque([(clock(), done, 0)], maxlen=WINDOW + 1)         # (time, steps done, tokens so far)
        self.printed, self.width, self.text = clock(), 0, ""

    def update(self, step: int, loss: float, tokens: int):
        """`step` steps are done now, the last of them with this loss (nats per token) on so many tokens, over all ranks."""
        now = self.clock()
        self.marks.append((now, step, self.marks[-1][2] + tokens))
        self.text = self._line(step, loss)
        if self.terminal:
            self._rewrite(self.text)
        elif now - self.printed >= self.every or step == self.steps:
            self.printed = now
            print(self.text, file=self.out, flush=True)

    def close(self):
        """End the line on a terminal, so that what follows stands below it.  No matter how often."""
        if self.terminal and self.text:
            print(file=self.out, flush=True)
        self.text, self.width = "", 0

    def _line(self, step, loss):
        (then, first, before), (now, _, after) = self.marks[0], self.marks[-1]
        taken = max(now - then, 1e-9)
        left = (self.steps - step) * taken / max(step - first, 1)
        return f"step {step}/{self.steps}  loss {loss:.4f}  {(after - before) / taken:,.0f} tokens/s  {spell_time(left)} left"

    def _rewrite(self, text):
        """Over the last line, blanks over what stuck out of it."""
        print("\r" + text.ljust(self.width), end="", file=self.out, flush=True)
        self.width = len(text)


class Log:
    """JSON lines: one object a line, on the disk's side of this process as soon as it is written.

    An old log is gone on with; a last line that a killed run left unfinished is removed first.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.file = open(self.path, "ab+")
        except OSError as error:
            raise OSError(f"the file {self.path} cannot be written ({error.strerror})") from None
        self.file.seek(0)
        self.file.truncate(self.file.read().rfind(b"\n") + 1)

    def write(self, **fields):
        """One object, such as write(step=3, loss=2.5)."""
        line = json.dumps({name: _plain(value) for name, value in fields.items()}, allow_nan=False)
        self.file.write(line.encode() + b"\n")
        self.file.flush()

    def close(self):
        self.file.close()


def _plain(value):
    """A number as JSON has it: numpy's as Python's, and what JSON has no word for (nan, inf) as text."""
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
