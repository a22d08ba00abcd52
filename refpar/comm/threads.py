"""The world as threads of one process: no MPI needed, and every mistake is named.

One rank runs at a time: it holds the *baton*, and hands it on when it must wait for a message.  So a run is repeatable, and a
deadlock is known exactly and at once: nobody is ready to take the baton.  This world is refpar's sanitizer.  It reports

    a deadlock, with who waits for whom;  messages that nobody received, requests that nobody waited for;
    a receive of another size or dtype than was sent;  a send buffer that was written before its wait;
    a receive buffer that is read before its wait (it holds NaN, or -1, until then).

A seed draws another order of ranks; the baton then goes round at every message.  `eager` is the largest message, in bytes, that
leaves without its receiver: a larger send is a rendezvous, complete only when its receive has been posted.  MPI has both kinds.
"""
from __future__ import annotations

import random
import sys
from collections import defaultdict, deque
from contextvars import Context
from threading import Lock, Thread

import numpy as np

from refpar.comm.report import Wait, deadlock_text, letters_text, place
from refpar.comm.wire import Aborted, Deadlock, Wire, bytes_of, require_received


class ThreadWorld:
    """Runs programs on ranks that are threads of this process, as many as a program asks for."""
    kind = "threads"
    main = True         # this process prints
    size = None         # any number of ranks

    def __init__(self, seed: int | None = None, eager: int = 65536):
        self.seed = seed
        self.eager = eager

    def run(self, program, size: int, *args) -> list:
        """program(wire, *args) on ranks 0 to size - 1; their results in that order.

        What a rank raises is raised here: the same object, with a note that names the rank.
        """
        if size < 1:
            raise ValueError(f"run: a world has 1 rank or more, not {size}")
        if self.seed is None:
            return Baton(size, self.eager, first_come, restless=False).run(program, args)
        return Baton(size, self.eager, random.Random(self.seed).choice, restless=True).run(program, args)

    def leave(self, status: int):
        """End the program with `status`."""
        sys.exit(status)


def first_come(ready: list[int]) -> int:
    """The order of ranks where no seed is given: who has been ready longest."""
    return ready[0]


class Letter:
    """A message under way: a copy of what was posted, and whether a receive has met it."""
    __slots__ = ("array", "met")

    def __init__(self, array):
        self.array = array.copy()
        self.met = False


class ThreadWire(Wire):
    """One rank's end.  The state of a request is its letter; that of a receive is None until it has met one."""

    def __init__(self, rank, baton):
        super().__init__(rank, baton.size)
        self.baton = baton

    def start(self, request):
        self.baton.pause(self.rank)
        if request.way == "send":
            request.state = Letter(request.array)
            self.baton.post((self.rank, request.peer, request.tag), letter=request.state)
        else:
            bytes_of(request.array)[:] = 255
            self.baton.post((request.peer, self.rank, request.tag), receive=request)

    def complete(self, request):
        while not self._done(request):
            self.baton.block(self.rank, request)
        letter, array = request.state.array, request.array
        if request.way == "send":
            if not np.array_equal(bytes_of(letter), bytes_of(array)):
                raise ValueError(f"rank {self.rank} of {self.size} wrote into the buffer of {request} before its wait")
        elif letter.size != array.size or letter.dtype != array.dtype:
            raise ValueError(f"rank {self.rank} of {self.size} receives {in_words(array)} from rank {request.peer}, tag "
                             f"{request.tag}, which sent {in_words(letter)}")
        else:
            bytes_of(array)[:] = bytes_of(letter)

    def _done(self, request):
        if request.way == "recv":
            return request.state is not None
        return request.state.met or request.array.nbytes <= self.baton.eager


def in_words(array) -> str:
    """Size, dtype and bytes of a message."""
    return f"{array.size} x {array.dtype} ({array.nbytes} bytes)"


class Baton:
    """One run.  Whoever holds the baton is the only thread that runs, so nothing here needs another lock.

    choose(ready) -> rank takes the next one from the ranks that can go on, longest ready first; a clock may choose too.
    restless: the baton goes round at every message, not only where a rank must wait.
    """

    def __init__(self, size, eager, choose, restless):
        self.size, self.eager, self.choose, self.restless = size, eager, choose, restless
        self.ready = list(range(size))
        self.alive = list(range(size))          # not returned
        self.waiting = {}                       # rank -> the request that it is blocked on
        self.letters = defaultdict(deque)       # (source, to, tag) -> letters that no receive has met
        self.receives = defaultdict(deque)      # (source, to, tag) -> receives that no letter has met
        self.failure = None
        self.locks = [Lock() for _ in range(size)]
        self.ended = Lock()
        self.wires = [ThreadWire(rank, self) for rank in range(size)]
        self.results = [None] * size
        self.threads = []

    def run(self, program, args) -> list:
        """Start every rank, wait for all, raise what failed."""
        for lock in [*self.locks, self.ended]:
            lock.acquire()
        self.threads = [Thread(target=self._rank, args=(rank, program, args), daemon=True) for rank in range(self.size)]
        for thread in self.threads:
            thread.start()
        self._hand_on()
        try:
            self.ended.acquire()
        except KeyboardInterrupt as stop:
            self.failure = stop                 # every rank ends at its next message
            self.ended.acquire(timeout=1)
        if self.failure is not None:
            raise self.failure
        require_received([wire.books for wire in self.wires])
        return self.results

    def _rank(self, rank, program, args):
        """The life of one rank's thread.  A fresh context: no rank sees another's observers."""
        self.locks[rank].acquire()
        try:
            self._check()
            self.results[rank] = Context().run(program, self.wires[rank], *args)
            self.wires[rank].close()
        except SystemExit as stop:
            self._fail(rank, RuntimeError(f"rank {rank} called sys.exit({stop.code}) in the middle of a run"))
        except BaseException as error:
            self._fail(rank, error)
        self.alive.remove(rank)
        self._hand_on()

    def _fail(self, rank, error):
        if self.failure is None:
            error.add_note(f"[raised on rank {rank} of {self.size}]")
            self.failure = error

    def _check(self):
        if self.failure is not None:
            raise Aborted("another rank failed")

    # The baton.

    def _hand_on(self):
        """Wake the rank that runs next.  After a failure every rank is woken, in order, to end."""
        if not self.alive:
            self.ended.release()
            return
        if not self.ready and self.failure is None:
            self.failure = Deadlock(self._deadlock())
        if self.failure is not None:
            rank = self.alive[0]
        else:
            rank = self.choose(self.ready)
            self.ready.remove(rank)
        self.locks[rank].release()

    def pause(self, rank):
        """At a message: let another rank go first."""
        self._check()
        if self.restless:
            self.ready.append(rank)
            self._hand_on()
            self.locks[rank].acquire()
            self._check()

    def block(self, rank, request):
        """Let the others run until `request` has met its other end."""
        self._check()
        self.waiting[rank] = request
        self._hand_on()
        self.locks[rank].acquire()
        self._check()

    # The post.

    def post(self, way, letter=None, receive=None):
        """A letter or a receive: it meets the oldest of the other kind on its way, or lies until one comes."""
        mine, others = (self.letters, self.receives) if letter else (self.receives, self.letters)
        if not others[way]:
            mine[way].append(letter or receive)
            return
        if letter:
            receive = others[way].popleft()
        else:
            letter = others[way].popleft()
        receive.state = letter
        letter.met = True
        for rank in way[:2]:
            if rank in self.waiting and self.waiting[rank].state is letter:
                del self.waiting[rank]
                self.ready.append(rank)

    def _deadlock(self):
        """Called by a rank that found nobody ready; all others stand in `block`."""
        frames = sys._current_frames()
        waits = {rank: Wait(str(request), request.peer, place(frames[self.threads[rank].ident]))
                 for rank, request in self.waiting.items()}
        told = {id(request.state) for request in self.waiting.values()}
        lying = [(way, letter) for way, letters in sorted(self.letters.items()) for letter in letters if id(letter) not in told]
        return deadlock_text(waits, [rank for rank in range(self.size) if rank not in waits],
                             [letters_text(1, letter.array.nbytes, *way) for way, letter in lying])
