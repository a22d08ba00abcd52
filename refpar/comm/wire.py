"""The wire: one rank's end of the world.  Everything that ranks tell each other goes through two calls, `isend` and `irecv`.

A message is a C-contiguous numpy array.  `isend` and `irecv` post it and return a Request; until its `wait()` the array belongs
to the wire: nobody writes what is being sent, nobody reads what is being received.  Messages from one rank to another under one
tag arrive in the order in which they were sent.

There are two bodies, `threads` and `mpi`.  Each fills in `start` and `complete`; all else stands here once: the checks at the
door, blocking `send` and `recv`, what observers are told, and the books from which unreceived messages are found.
"""
from __future__ import annotations

import pickle
import sys
from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.sanitizer.calls import Call, Calls
from refpar.sanitizer.endings import Leftover
from refpar.sanitizer.report import site_of_call

LIMIT = 2**31 - 1       # bytes: MPI counts in C ints
INTERRUPTED = 130       # exit status of Ctrl-C, as shells say it
TAGS = 2**15            # MPI promises tags up to 32767


class Failed(RuntimeError):
    """The world outside ended a run, such as a disk that is full: the text is the whole story, and needs no traceback."""


class Account(NamedTuple):
    """What a wire that has done its work leaves to be compared with the others'."""
    books: dict
    calls: Calls


class Request:
    """A message that was posted by this rank, on the errand that it then had.  The last three belong to the wire's body."""
    __slots__ = ("wire", "way", "array", "peer", "tag", "errand", "state", "site", "number")

    def __init__(self, wire, way, array, peer, tag):
        self.wire, self.way, self.array, self.peer, self.tag = wire, way, array, peer, tag
        self.errand = watch.current()
        self.state = self.site = self.number = None

    def wait(self):
        """Return when the array is this rank's again: it was received, or may be overwritten."""
        self.wire.finish(self)

    def __str__(self):
        direction = "to" if self.way == "send" else "from"
        return f"{self.way}({self.array.nbytes} bytes, tag {self.tag}) {direction} rank {self.peer}"


class Wire:
    """rank: the number of this end.  size: how many ranks there are."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
        self.open: dict[Request, None] = {}     # posted and not waited for, in that order
        self.books: dict[tuple, tuple] = {}     # (way, peer, tag) -> (messages, bytes, a sum over dtypes) that left or arrived
        self.calls = Calls()

    # What a body fills in.

    def start(self, request: Request):
        """Set the message on its way; never blocks."""
        raise NotImplementedError

    def complete(self, request: Request):
        """Block until the message has been received, or its array may be written again."""
        raise NotImplementedError

    # What a program calls.

    def began(self, operation: str, x, axis, options: dict) -> Call:
        """A collective begins on an axis of this wire, with these options."""
        return self.calls.add(operation, x, axis, options, site_of_call(sys._getframe()))

    def isend(self, array: np.ndarray, to: int, tag: int = 0) -> Request:
        """Start to send `array`, of any shape and dtype, to rank `to`."""
        request = self._post("send", array, to, tag)
        self._book(request)
        return request

    def irecv(self, out: np.ndarray, source: int, tag: int = 0) -> Request:
        """Start to receive from rank `source` into `out`, which has the size and dtype of what is sent."""
        return self._post("recv", out, source, tag)

    def send(self, array: np.ndarray, to: int, tag: int = 0):
        """Send, and return when `array` may be overwritten."""
        self.isend(array, to, tag).wait()

    def recv(self, out: np.ndarray, source: int, tag: int = 0):
        """Receive into `out`."""
        self.irecv(out, source, tag).wait()

    def finish(self, request: Request):
        """The one way in which a request ends."""
        if request not in self.open:
            raise ValueError(f"rank {self.rank} of {self.size}: wait() was called twice on {request}")
        self.complete(request)
        del self.open[request]
        if request.way == "recv":
            self._book(request)

    def close(self):
        """The rank's program has returned: every request must have been waited for."""
        if self.open:
            waits = ", ".join(map(str, self.open))
            raise Leftover(f"rank {self.rank} of {self.size} returned without waiting for {waits}")

    def account(self) -> Account:
        """For `require_settled`, elsewhere."""
        return Account(self.books, self.calls)

    def _post(self, way, array, peer, tag):
        self._check(way, array, peer, tag)
        request = Request(self, way, array, peer, tag)
        self.start(request)
        self.open[request] = None
        return request

    def _check(self, way, array, peer, tag):
        call = f"rank {self.rank} of {self.size}: {way}"
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise ValueError(f"{call} needs a numpy array of numbers, not {type(array).__name__}")
        if not array.flags.c_contiguous:
            raise ValueError(f"{call} needs a C-contiguous array; this one has shape {array.shape} and strides {array.strides}")
        if way == "recv" and not array.flags.writeable:
            raise ValueError(f"{call} cannot write into a read-only array of shape {array.shape}")
        if not 0 <= peer < self.size:
            raise ValueError(f"{call} names rank {peer}; ranks are 0 to {self.size - 1}")
        if not 0 <= tag < TAGS:
            raise ValueError(f"{call} has tag {tag}; tags are 0 to {TAGS - 1}")

    def _book(self, request):
        """A message left or arrived: the one place where observers are told."""
        nbytes, dtype = request.array.nbytes, request.array.dtype
        key = request.way, request.peer, request.tag
        messages, total, kinds = self.books.get(key, (0, 0, 0))
        self.books[key] = messages + 1, total + nbytes, kinds + nbytes * ord(dtype.kind)
        watch.message(request.way, request.peer, request.array, request.errand)


def bytes_of(array: np.ndarray) -> np.ndarray:
    """The memory of a C-contiguous array, as uint8 [nbytes]; a view, for empty and 0-d arrays too."""
    return array.reshape(array.size).view(np.uint8)


def pieces(nbytes: int, limit: int = LIMIT) -> list[tuple[int, int]]:
    """How a message is cut that is longer than MPI can count: (start, stop) of each piece; an empty message is one piece."""
    nbytes = int(nbytes)
    return [(start, min(start + limit, nbytes)) for start in range(0, max(nbytes, 1), limit)]


# Python objects, for the results of a run only: they are pickled, which costs many times what an array costs.

def send_object(wire: Wire, thing, to: int, tag: int = 0):
    """Send any object that can be pickled: its length first, then its bytes."""
    data = np.frombuffer(pickle.dumps(thing, pickle.HIGHEST_PROTOCOL), np.uint8)
    wire.send(np.array([data.size], np.int64), to, tag)
    wire.send(data, to, tag)


def recv_object(wire: Wire, source: int, tag: int = 0):
    """Receive what `send_object` sent."""
    length = np.empty(1, np.int64)
    wire.recv(length, source, tag)
    data = np.empty(int(length[0]), np.uint8)
    wire.recv(data, source, tag)
    return pickle.loads(data)


def gather_objects(wire: Wire, thing, root: int = 0) -> list | None:
    """Every rank's object on `root`, in the order of ranks; None elsewhere."""
    if wire.rank != root:
        send_object(wire, thing, root)
        return None
    return [thing if rank == root else recv_object(wire, rank) for rank in range(wire.size)]


def share_object(wire: Wire, thing=None, root: int = 0):
    """The object of `root`, on every rank."""
    if wire.rank != root:
        return recv_object(wire, root)
    for rank in range(wire.size):
        if rank != root:
            send_object(wire, thing, rank)
    return thing
