"""The world as threads of one process: no MPI needed, and every mistake is named.

One rank runs at a time: it holds the *baton*, and hands it on when it must wait for a message.  So a run is repeatable, and a
deadlock is known exactly and at once: nobody is ready to take the baton.  This world is refpar's sanitizer.  It reports

    a deadlock, with who waits for whom;  messages that nobody received, requests that nobody waited for;
    collectives that are not the same on all ranks, before they send anything;  a message of one collective that meets another;
    a receive of another size or dtype than was sent;  a send buffer that was written before its wait;
    a receive buffer that was written before its wait, or read and then sent or returned (`poison`).

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

from refpar import watch
from refpar.sanitizer import poison
from refpar.sanitizer.calls import Mismatch, Roll, same_errand
from refpar.sanitizer.endings import Aborted, Deadlock, require_settled
from refpar.sanitizer.report import buffer_text, deadlock_text, ends_text, errand_text, in_words, letters_text, site, wait_of
from refpar.comm.wire import Wire, bytes_of


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
        choose = first_come if self.seed is None else random.Random(self.seed).choice
        return self.baton(size, choose).run(program, args)

    def baton(self, size: int, choose) -> Baton:
        """What hands the ranks of one run their turns; a world that keeps virtual time has its own (`refpar/clock.py`)."""
        return Baton(size, self.eager, choose, restless=self.seed is not None)

    def leave(self, status: int):
        """End the program with `status`."""
        sys.exit(status)


def first_come(ready: list[int]) -> int:
    """The order of ranks where no seed is given: who has been ready longest."""
    return ready[0]


class Letter:
    """A message under way: its request, a copy of the bytes that were posted, and whether a receive has met it."""
    __slots__ = ("request", "data", "met")

    def __init__(self, request):
        self.request = request
        self.data = request.array.tobytes()
        self.met = False


class ThreadWire(Wire):
    """One rank's end.  The state of a request is its letter; that of a receive is None until it has met one."""

    def __init__(self, rank, baton):
        super().__init__(rank, baton.size)
        self.baton = baton

    def began(self, operation, x, axis, options):
        call = super().began(operation, x, axis, options)
        self.baton.roll.add(call)
        return call

    def start(self, request):
        self.baton.pause(self.rank)
        request.site = site(sys._getframe())
        if request.way == "send":
            self.refuse_poison(request.array, f"sends to rank {request.peer}")
            request.state = Letter(request)
            self.baton.post((self.rank, request.peer, request.tag), letter=request.state)
        else:
            request.number = self.baton.receives.add(request)
            poison.fill(request.array, request.number)
            self.baton.post((request.peer, self.rank, request.tag), receive=request)

    def complete(self, request):
        while not self._done(request):
            self.baton.block(self.rank, request)
        self.baton.waited(request)
        letter, array = request.state, request.array
        if request.way == "send":
            if not letter.data.startswith(bytes_of(array)):         # as long as the data: equal, and nothing is copied
                was = np.frombuffer(letter.data, array.dtype).reshape(array.shape)
                raise ValueError(self._spoilt(request, f", and element {first_difference(was, array)}"))
            request.state = None            # the letter may still lie there: request and letter must not keep each other alive
            return
        sent = letter.request.array
        if sent.size != array.size or sent.dtype != array.dtype:
            raise ValueError(f"rank {self.rank} of {self.size} receives {in_words(array)} from rank {request.peer}, tag "
                             f"{request.tag}, which sent {in_words(sent)}{ends_text(letter.request, request)}")
        if not poison.untouched(array, request.number):
            raise ValueError(self._spoilt(request, ""))
        bytes_of(array)[:] = np.frombuffer(letter.data, np.uint8)

    def _done(self, request):
        if request.way == "recv":
            return request.state is not None
        return request.state.met or request.array.nbytes <= self.baton.eager

    def _spoilt(self, request, how) -> str:
        """A buffer was written while it belonged to the wire."""
        here = sys._getframe()
        return (f"rank {self.rank} of {self.size} wrote into the buffer of {request} before its wait: "
                f"{buffer_text(request.array, here)}{how}"
                f"\n  posted  ({request.site}){errand_text(request.errand)}\n  waited for  ({site(here)})")

    def refuse_poison(self, array, what):
        """ValueError where what this rank sends or returns was made from a receive buffer before its wait."""
        early = self.baton.receives.read_in(array)
        if early:
            raise ValueError(f"rank {self.rank} of {self.size} {what} what was read from a receive buffer before its wait: {early}")


def first_difference(was, now) -> str:
    """Where two arrays of the same shape and dtype first differ, in words."""
    size = was.dtype.itemsize
    place = int(np.argmax(bytes_of(was) != bytes_of(now))) // size
    return f"{[int(i) for i in np.unravel_index(place, was.shape)]} was {was.flat[place]} and is {now.flat[place]}"


class Baton:
    """One run.  Whoever holds the baton is the only thread that runs, so nothing here needs another lock.

    choose(ready) -> rank takes the next one from the ranks that can go on, longest ready first.
    restless: the baton goes round at every message, not only where a rank must wait.
    """

    def __init__(self, size, eager, choose, restless):
        self.size, self.eager, self.choose, self.restless = size, eager, choose, restless
        self.ready = list(range(size))
        self.alive = list(range(size))          # not returned
        self.waiting = {}                       # rank -> the request that it is blocked on
        self.letters = defaultdict(deque)       # (source, to, tag) -> letters that no receive has met
        self.posted = defaultdict(deque)        # (source, to, tag) -> receives that no letter has met
        self.roll = Roll()
        self.receives = poison.Receives()
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
        require_settled(self.wires)
        return self.results

    def _rank(self, rank, program, args):
        """The life of one rank's thread.  A fresh context: no rank sees another's observers."""
        self.locks[rank].acquire()
        try:
            self._check()
            self.results[rank] = Context().run(program, self.wires[rank], *args)
            self.wires[rank].close()
            for array in watch.arrays_of(self.results[rank]):
                self.wires[rank].refuse_poison(np.asarray(array, order="C"), "returns")
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
        mine, others = (self.letters, self.posted) if letter else (self.posted, self.letters)
        if not others[way]:
            mine[way].append(letter or receive)
            return
        if letter:
            receive = others[way].popleft()
        else:
            letter = others[way].popleft()
        if not same_errand(letter.request.errand, receive.errand):
            raise Mismatch("mismatch: a message meets a receive that does not belong to it" + ends_text(letter.request, receive))
        self.meet(letter, receive)

    def meet(self, letter, receive):
        """They belong together: whoever waits for either can go on."""
        receive.state, letter.met = letter, True
        for request in (letter.request, receive):
            if self.waiting.get(request.wire.rank) is request:
                del self.waiting[request.wire.rank]
                self.ready.append(request.wire.rank)

    def waited(self, request):
        """A rank's wait for `request` is over: a clock wants to know."""

    def _deadlock(self):
        """Called by a rank that found nobody ready; all others stand in `block`."""
        frames = sys._current_frames()
        waits = {rank: wait_of(request, site(frames[self.threads[rank].ident])) for rank, request in self.waiting.items()}
        told = {id(request.state) for request in self.waiting.values()}
        lying = [letter.request for _, letters in sorted(self.letters.items()) for letter in letters if id(letter) not in told]
        return deadlock_text(waits, [rank for rank in range(self.size) if rank not in waits],
                             [f"{letters_text(1, send.array.nbytes, send.wire.rank, send.peer, send.tag)}  ({send.site})"
                              f"{errand_text(send.errand)}{self._wanted(send)}" for send in lying])

    def _wanted(self, send) -> str:
        """What the receiver of a message that nobody received waits for instead."""
        receive = self.waiting.get(send.peer)
        if receive is None or receive.way == "send":
            return ""
        if receive.peer != send.wire.rank:
            return f"; rank {send.peer} waits for a message from rank {receive.peer}"
        return f"; rank {send.peer} waits for tag {receive.tag}"
