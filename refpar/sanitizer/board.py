"""A board in shared memory: where the processes of one machine write what they wait for.

Threads know a deadlock at once; processes must find out.  A rank that has waited for a while writes so on the board, with what it
waits for.  When every rank of a run waits or has ended, and nothing has moved for half a second while all of them went on
looking for their messages, then nothing will ever come: the lowest waiting rank reads the board and reports it.  The
board also has one word by which a failing rank tells the others to stop.

A board costs a wait of less than 10 ms nothing.  Ranks on several machines share no memory: they go without (`NoBoard`).
"""
from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import time
from contextlib import suppress

import numpy as np

from refpar.sanitizer.calls import Calls, Mismatch, different
from refpar.sanitizer.endings import Aborted, Deadlock
from refpar.sanitizer.report import Wait, deadlock_text

RUNNING, WAITING, ENDED = range(3)
TICK = 0.01             # seconds between two looks at the board
PATIENCE = 0.5          # seconds without any move before a deadlock is reported,
SPEED = 1e8             # and as long again as the largest message takes at this many bytes a second
LOOKS = 20              # looks that every waiting rank must have taken in that time
RECORD = np.dtype([("state", "i8"), ("run", "i8"), ("moved", "i8"), ("looked", "i8"), ("bytes", "i8"),
                   ("wait", "S1024"), ("calls", "S8192"), ("stop", "i8")])


class NoBoard:
    """For ranks that share no memory: tells nothing, knows nothing."""

    def begin(self, run, size, calls): ...
    def end(self, gone=False): ...
    def stop(self): ...
    def look(self, wait, nbytes): ...
    def move(self): ...
    def mismatch(self): ...


class Board(NoBoard):
    """memory: uint8 [ranks * RECORD.itemsize], zeros at first and shared by all ranks.  Each rank writes its own record only."""

    def __init__(self, memory, rank: int):
        self.records = memory.view(RECORD)
        self.rank = rank
        self.size = 0               # ranks of the present run
        self.calls = Calls()
        self.mine = self.records[rank:rank + 1]
        self.since = 0.0            # when the board last changed, as seen from here
        self.seen = None            # (state, run, moved) of all ranks at that time
        self.looked = None          # their looks at that time

    def begin(self, run: int, size: int, calls: Calls):
        """This rank begins run number `run`, from 1, which has `size` ranks, and will note in `calls` what it calls."""
        self.size, self.calls = size, calls
        self.mine["state"] = RUNNING
        self.mine["run"] = run

    def end(self, gone: bool = False):
        """This rank has returned; gone: its process is about to end."""
        if gone:
            self.mine["run"] = -1
        self._write("calls", list(self.calls.last))
        self.mine["state"] = ENDED

    def stop(self):
        """Tell all ranks of this run to stop."""
        self.mine["stop"] = self.mine["run"]

    def move(self):
        """What this rank waited for has come."""
        if self.mine["state"][0] == WAITING:
            self.mine["moved"] += 1
            self.mine["state"] = RUNNING

    def look(self, wait: Wait, nbytes: int):
        """This rank still waits, for a message of so many bytes.  Raises Aborted when another rank has failed, and when no rank
        can go on: from a Deadlock, or from a Mismatch if that is why."""
        if self.mine["state"][0] != WAITING:
            self._write("wait", wait)
            self._write("calls", list(self.calls.last))
            self.mine["bytes"] = nbytes
            self.mine["state"] = WAITING
        self.mine["looked"] += 1
        ranks = self.records[:self.size].copy()
        run = self.mine["run"][0]
        if np.any(ranks["stop"] == run):
            raise Aborted("another rank failed")
        if self._stuck(ranks, run):
            waits = {rank: pickle.loads(record["wait"]) for rank, record in enumerate(ranks) if record["state"] == WAITING}
            text = deadlock_text(waits, [rank for rank in range(self.size) if rank not in waits], [])
            why = self.mismatch()
            raise Aborted("deadlock") from (Mismatch(f"{why}\n{text}") if why else Deadlock(text))

    def mismatch(self) -> Mismatch | None:
        """What differs in the last calls of this rank and of those that wait or have returned; None if nothing does."""
        before, ranks, after = (self.records[:self.size].copy() for _ in range(3))
        quiet = (before == after) & (ranks["state"] != RUNNING) & (ranks["run"] == self.mine["run"])
        told = different([*self.calls.last, *(call for rank in np.flatnonzero(quiet) if rank != self.rank
                                              for call in pickle.loads(ranks["calls"][rank]))])
        return Mismatch(told) if told else None

    def _write(self, field: str, thing):
        """Pickled; a list that is too long loses its first half."""
        while len(data := pickle.dumps(thing)) > RECORD[field].itemsize:
            thing = thing[len(thing) // 2 + 1:]
        self.mine[field] = data

    def _stuck(self, ranks, run) -> bool:
        """Whether this rank is the one to report, and nothing has moved for long enough."""
        waiting = ranks["state"] == WAITING
        seen = ranks[["state", "run", "moved"]].tolist()
        now = time.monotonic()
        if seen != self.seen:
            self.since, self.seen, self.looked = now, seen, ranks["looked"]
        patience = PATIENCE + ranks["bytes"][waiting].max() / SPEED
        return (np.argmax(waiting) == self.rank and now - self.since > patience
                and np.all((ranks["run"] == run) | (ranks["run"] == -1)) and np.all(ranks["state"] != RUNNING)
                and np.all((ranks["looked"] - self.looked >= LOOKS)[waiting]))


def hang_up(size: int) -> str:
    """A file for the records of so many ranks, all zeros: the path by which each of them opens its board."""
    file, path = tempfile.mkstemp(prefix="refpar-board-")
    os.truncate(file, RECORD.itemsize * size)
    os.close(file)
    return path


def opened(path: str, size: int, rank: int) -> NoBoard:
    """The board of a rank; NoBoard where the file is not there, as for ranks in containers of their own."""
    try:
        with open(path, "r+b") as file:
            return Board(np.frombuffer(mmap.mmap(file.fileno(), RECORD.itemsize * size), np.uint8), rank)
    except OSError:
        return NoBoard()


def take_name(path: str):
    """All have opened it: the file is memory now, and needs no name (Windows keeps an open file's)."""
    with suppress(OSError):
        os.unlink(path)
