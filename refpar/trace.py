"""A trace of a run: what each rank did and when, as JSON for Chrome's about:tracing or for Perfetto.

A rank is a line of the picture.  On it lie spans: a layer's forward (`1.attention`) and backward (`d 1.attention`), each from
the event before it, and collectives (`all_reduce on dp`) from begin to end; and instants: messages, with peer and bytes.
Times are real, in microseconds since the first rank began.
"""
from __future__ import annotations

import json
import time
from pathlib import Path

from refpar import watch
from refpar.comm.wire import Failed, gather_objects


class Trace(watch.Observer):
    """Collects the events of one rank, as dicts of the trace format; `ts` and `dur` in seconds until they are written."""

    def __init__(self, rank: int):
        self.rank, self.events, self.last, self.begun = rank, [], time.time(), 0.0

    def _add(self, name: str, kind: str, phase: str, begun: float, **more):
        self.last = time.time()
        self.events.append({"name": name, "cat": kind, "ph": phase, "ts": begun, "pid": 0, "tid": self.rank} | more)

    def _span(self, name: str, kind: str, begun: float):
        self._add(name, kind, "X", begun, dur=time.time() - begun)

    def value(self, name, array):
        self._span(name, "layer", self.last)

    def began(self, axis, operation):
        self.begun = time.time()

    def ended(self, axis, operation):
        self._span(f"{operation} on {axis}", "communication", self.begun)

    def message(self, told):
        self._add(f"{told.way} {told.bytes} bytes", "message", "i", time.time(), s="t",
                  args={"peer": told.peer, "axis": told.axis, "operation": told.operation})


class Traced:
    """A program that also leaves a trace: `world.run(Traced(program, path), size, ...)`; rank 0 writes the file."""

    def __init__(self, program, path: Path):
        self.program, self.path = program, path

    def __call__(self, wire, *args):
        with watch.watching(Trace(wire.rank)) as trace:
            result = self.program(wire, *args)
        lists = gather_objects(wire, trace.events)
        if wire.rank == 0:
            told = json.dumps({"traceEvents": in_microseconds([event for events in lists for event in events])})
            try:
                self.path.write_text(told)
            except OSError as error:
                raise Failed(f"the trace {self.path} cannot be written: {error.strerror}") from error
        return result


def in_microseconds(events: list[dict]) -> list[dict]:
    """Seconds of the clock become microseconds since the first event."""
    first = min((event["ts"] for event in events), default=0.0)
    scaled = ({"ts": round((event["ts"] - first) * 1e6, 1)} | ({"dur": round(event["dur"] * 1e6, 1)} if "dur" in event else {})
              for event in events)
    return [event | times for event, times in zip(events, scaled)]


def writable(path: Path | None) -> Path | None:
    """The path itself; ValueError, one sentence, where no file can be written there."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--trace {path} must be a file in a folder that is there")
    return path
