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
import tempfile
import time
from contextlib import suppress

import numpy as np

from refpar.comm.report import Wait, deadlock_text
from refpar.comm.wire import Aborted, Deadlock, Wire, gather_objects, share_object

RUNNING, WAITING, ENDED = range(3)
TICK = 0.01             # seconds between two looks at the board
PATIENCE = 0.5          # seconds without any move before a deadlock is reported,
SPEED = 1e8             # and as long again as the largest message takes at this many bytes a second
LOOKS = 20              # looks that every waiting rank must have taken in that time
RECORD = np.dtype([("state", "i8"), ("run", "i8"), ("moved", "i8"), ("looked", "i8"), ("bytes", "i8"), ("peer", "i8"),
                   ("what", "S96"), ("place", "S176"), ("stop", "i8")])


class NoBoard:
    """For ranks that share no memory: tells nothing, knows nothing."""

    def begin(self, run, size): ...
    def end(self, gone=False): ...
    def stop(self): ...
    def look(self, what, request, place): ...
    def move(self): ...


class Board(NoBoard):
    """memory: uint8 [ranks * RECORD.itemsize], zeros at first and shared by all ranks.  Each rank writes its own record only."""

    def __init__(self, memory, rank: int):
        self.records = memory.view(RECORD)
        self.rank = rank
        self.size = 0               # ranks of the present run
        self.mine = self.records[rank:rank + 1]
        self.since = 0.0            # when the board last changed, as seen from here
        self.seen = None            # (state, run, moved) of all ranks at that time
        self.looked = None          # their looks at that time

    def begin(self, run: int, size: int):
        """This rank begins run number `run`, from 1, which has `size` ranks."""
        self.size = size
        self.mine["state"] = RUNNING
        self.mine["run"] = run

    def end(self, gone: bool = False):
        """This rank has returned; gone: its process is about to end."""
        if gone:
            self.mine["run"] = -1
        self.mine["state"] = ENDED

    def stop(self):
        """Tell all ranks of this run to stop."""
        self.mine["stop"] = self.mine["run"]

    def move(self):
        """What this rank waited for has come."""
        if self.mine["state"][0] == WAITING:
            self.mine["moved"] += 1
            self.mine["state"] = RUNNING

    def look(self, what: str, request, place: str):
        """This rank still waits.  Raises Aborted when another rank has failed, and when no rank can go on: from a Deadlock."""
        if self.mine["state"][0] != WAITING:
            self.mine["what"], self.mine["place"] = what.encode(), place.encode()
            self.mine["bytes"], self.mine["peer"] = request.array.nbytes, request.peer
            self.mine["state"] = WAITING
        self.mine["looked"] += 1
        ranks = self.records[:self.size].copy()
        run = self.mine["run"][0]
        if np.any(ranks["stop"] == run):
            raise Aborted("another rank failed")
        if self._stuck(ranks, run):
            waits = {int(rank): Wait(record["what"].decode(), int(record["peer"]), record["place"].decode(errors="replace"))
                     for rank, record in enumerate(ranks) if record["state"] == WAITING}
            ended = [rank for rank in range(self.size) if rank not in waits]
            raise Aborted("deadlock") from Deadlock(deadlock_text(waits, ended, []))

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


def hang_up(wire: Wire):
    """A board for the ranks of `wire`, which are on one machine: a file that all map, and that has no name afterwards."""
    nbytes = RECORD.itemsize * wire.size
    path = None
    if wire.rank == 0:
        file, path = tempfile.mkstemp(prefix="refpar-board-")
        os.truncate(file, nbytes)
        os.close(file)
    path = share_object(wire, path)
    try:
        with open(path, "r+b") as file:
            memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    except OSError:                     # ranks in containers of their own share no files either
        memory = None
    seen = gather_objects(wire, memory is not None)
    if wire.rank == 0:
        with suppress(OSError):         # Windows keeps an open file's name
            os.unlink(path)
    return Board(memory, wire.rank) if share_object(wire, seen and all(seen)) else NoBoard()
