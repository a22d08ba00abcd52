"""A trace of a run: what each rank did and when, as JSON for Chrome's about:tracing or for Perfetto.

A rank is a line of the picture.  On it lie spans: a layer's forward (`1.attention`) and backward (`d 1.attention`), each from
the event before it, and collectives (`all_reduce on dp`) from begin to end; and instants: messages, with peer and bytes.
Times are in microseconds since the first rank began: real ones, or those of a virtual clock (`refpar/clock.py`).

`chart` draws the spans as text, for those who have no browser at hand: it is what a file whose name ends with .txt gets.
"""
from __future__ import annotations

import json
import math
import time
from fractions import Fraction
from pathlib import Path
from typing import Callable

from refpar import watch
from refpar.comm.wire import Failed, gather_objects


class Trace(watch.Observer):
    """Collects the events of one rank, as dicts of the trace format; `ts` and `dur` in seconds until they are written.

    read() -> the time now, in seconds.
    """

    def __init__(self, rank: int, read: Callable = time.time):
        self.rank, self.read, self.events, self.last, self.begun = rank, read, [], read(), 0

    def _add(self, name: str, kind: str, phase: str, begun, **more):
        self.last = self.read()
        self.events.append({"name": name, "cat": kind, "ph": phase, "ts": begun, "pid": 0, "tid": self.rank} | more)

    def _span(self, name: str, kind: str, begun):
        self._add(name, kind, "X", begun, dur=self.read() - begun)

    def value(self, name, array):
        self._span(name, "layer", self.last)

    def began(self, axis, operation):
        self.begun = self.read()

    def ended(self, axis, operation):
        self._span(f"{operation} on {axis}", "communication", self.begun)

    def message(self, told):
        self._add(f"{told.way} {told.bytes} bytes", "message", "i", self.read(), s="t",
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
            write(self.path, [event for events in lists for event in events])
        return result


def write(path: Path, events: list[dict]):
    """The events of all ranks, as a trace file, or as a chart."""
    told = f"{chart(events)}\n" if path.suffix == ".txt" else json.dumps({"traceEvents": in_microseconds(events)})
    try:
        path.write_text(told)
    except OSError as error:
        raise Failed(f"the trace {path} cannot be written: {error.strerror}") from error


def in_microseconds(events: list[dict]) -> list[dict]:
    """Seconds of the clock become microseconds since the first event."""
    first = min((event["ts"] for event in events), default=0)
    scaled = ({"ts": round((event["ts"] - first) * 1e6, 1)} | ({"dur": round(event["dur"] * 1e6, 1)} if "dur" in event else {})
              for event in events)
    return [event | times for event, times in zip(events, scaled)]


def chart(events: list[dict], unit=None) -> str:
    """A line for each rank, from left to right in time, `unit` seconds a column: a hundredth of the whole where None.

    A column shows the shortest span that covers its middle: the first letter of the span's name, a dot where the rank waits (a
    collective too, where only real time is known), a blank where it does nothing that was told.
    """
    spans = sorted((event for event in events if event["ph"] == "X" and event["dur"] > 0), key=lambda event: -event["dur"])
    first = min((span["ts"] for span in spans), default=0)
    whole = max((span["ts"] + span["dur"] for span in spans), default=0) - first
    unit = unit or Fraction(whole) / 100 or 1

    def column(moment) -> int:
        """The first one whose middle is not before the moment."""
        return math.ceil((moment - first) / Fraction(unit) - Fraction(1, 2))

    lines = {rank: [" "] * column(first + whole) for rank in sorted({event["tid"] for event in events})}
    for span in spans:
        begin, end = column(span["ts"]), column(span["ts"] + span["dur"])
        lines[span["tid"]][begin:end] = _mark(span) * (end - begin)
    return "\n".join(f"{rank:>4} |{''.join(line)}|" for rank, line in lines.items())


def _mark(span: dict) -> str:
    """The character of a span."""
    if span["cat"] in ("wait", "communication"):
        return "."
    return next((letter for letter in span["name"] if letter.isalpha()), "?")


def writable(path: Path | None) -> Path | None:
    """The path itself; ValueError, one sentence, where no file can be written there."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ValueError(f"--trace {path} must be a file in a folder that is there")
    return path
