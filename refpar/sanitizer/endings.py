"""How a run ends that did not go well, and the last look at one that seems to have gone well."""
from __future__ import annotations

from refpar.sanitizer.calls import Mismatch, disagreement
from refpar.sanitizer.report import leftovers, other_dtypes


class Deadlock(RuntimeError):
    """No rank can go on; the text says who waits for whom."""


class Leftover(RuntimeError):
    """A run ended with messages that nobody received; the text says who sent what to whom."""


class Aborted(BaseException):
    """Wakes a rank because another one failed.  Not an Exception, so that `except Exception` does not swallow it."""


def require_settled(wires: list):
    """Raise Mismatch or Leftover unless all ranks of a run called the same collectives and received every message.  wires: of
    all ranks, after all have returned; or whatever else has their `calls` and `books`."""
    told = disagreement([wire.calls for wire in wires])
    if told:
        raise Mismatch(told)
    found = leftovers([wire.books for wire in wires])
    if found:
        raise Leftover("all ranks have returned, but nobody received\n  " + "\n  ".join(found))
    found = other_dtypes([wire.books for wire in wires])
    if found:
        raise Mismatch("mismatch: not every message was received as the dtype that it was sent as\n  " + "\n  ".join(found))
