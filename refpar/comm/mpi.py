"""The world as processes, over MPI.  The only importer of mpi4py.

MPI carries the bytes; refpar waits by itself.  A library's own wait spins, which is a disaster as soon as there are more ranks
than cores: here a wait tests some 200 times (20 where ranks outnumber cores) and then naps for 20 us between tests.  That is as
fast as MPI_Wait while cores are free, several times faster when they are not, and it lets a waiting rank notice that another
one failed, ended, or waits for it in turn (`board`).  The libraries' own settings for it (MPIR_CVAR_ENABLE_HEAVY_YIELD and its
like) then gain nothing, so none is set.

When a rank raises, it prints its traceback and ends all ranks, inside `run` and (by an excepthook) outside: no run line hangs.
A command that finds bad input finds it on every rank alike, before `run`: it catches the ValueError, prints the sentence where
`world.main` is true, and calls `world.leave(2)` on every rank.

MPICH keeps about 5 MB a rank in /dev/shm, and dies of SIGBUS without a word where that is too small: 64 MB, the default of
Docker, is enough for 8 ranks; `docker run --shm-size=1g` for more.
"""
from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from contextvars import Context

from mpi4py import MPI

from refpar.sanitizer import board
from refpar.sanitizer.board import PATIENCE, TICK, NoBoard
from refpar.sanitizer.endings import Aborted, require_settled
from refpar.sanitizer.report import WIRES, Wait, errand_text, site, wait_of
from refpar.comm.wire import INTERRUPTED, LIMIT, Failed, Wire, bytes_of, gather_objects, pieces, share_object

NAP = 20e-6             # seconds between two tests of a wait
DRAIN = 0.25            # seconds for mpiexec to pass on what a failed rank printed: it drops what it has not read when it aborts
LONG_NAP = 2e-4         # the same, once it has lasted for a TICK


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def world_size() -> int:
    """How many processes MPI sees."""
    return MPI.COMM_WORLD.size


def library() -> str:
    """The name of the MPI library."""
    return " ".join(MPI.Get_library_version().partition("\n")[0].split())


class MpiWire(Wire):
    """One rank's end, on ranks 0 to size - 1 of `comm`.  The state of a request is its MPI requests, one for each piece.

    what(request): the words for what a long wait waits for.
    """
    limit = LIMIT       # bytes of a piece

    def __init__(self, comm, size: int, board, what=str):
        super().__init__(comm.rank, size)
        self.comm = comm
        self.board = board
        self.what = what
        self.spins = 200 if comm.size <= cores() else 20
        self.status = MPI.Status()

    def start(self, request):
        data = bytes_of(request.array)
        post = self.comm.Isend if request.way == "send" else self.comm.Irecv
        request.state = [post([data[begin:end], MPI.BYTE], request.peer, request.tag)
                         for begin, end in pieces(data.size, self.limit)]

    def complete(self, request):
        nbytes = 0
        for part in request.state:
            try:
                self._wait(part, request)
            except MPI.Exception as error:
                reason = error.Get_error_string().partition("\n")[0]
                raise self._another_length(request, f"in {request} met a longer message ({reason})") from None
            nbytes += self.status.Get_count(MPI.BYTE)
        if request.way == "recv" and nbytes != request.array.nbytes:
            raise self._another_length(request, f"receives {request.array.nbytes} bytes from rank {request.peer}, tag "
                                                f"{request.tag}, which sent {nbytes} bytes")

    def _wait(self, part, request):
        for _ in range(self.spins):
            if part.Test(self.status):
                return
        nap, tick = NAP, time.monotonic() + TICK
        while not part.Test(self.status):
            time.sleep(nap)
            if time.monotonic() > tick:
                self.board.look(self._waits(request), request.array.nbytes)
                nap, tick = LONG_NAP, time.monotonic() + TICK
        self.board.move()

    def _waits(self, request) -> Wait:
        return wait_of(request, site(sys._getframe()))._replace(what=self.what(request))

    def _another_length(self, request, told) -> ValueError:
        """What to raise when `request` met a message of another length.  The others will soon wait: did they call another thing?"""
        until = time.monotonic() + 4 * PATIENCE
        while not (mismatch := self.board.mismatch()) and time.monotonic() < until:
            time.sleep(TICK)
        where = f"({site(sys._getframe())}){errand_text(request.errand)}"
        return mismatch or ValueError(f"rank {self.rank} of {self.size} {told}  {where}")


class MpiWorld:
    """All processes that mpiexec started.  Every process makes one MpiWorld and calls `run` alike."""
    kind = "processes"

    def __init__(self):
        sys.excepthook = lambda kind, error, trace: end_all(error)
        self.comm = MPI.COMM_WORLD.Dup()        # for programs
        self.rank, self.size = self.comm.rank, self.comm.size
        self.main = self.rank == 0              # this process prints
        self.board = shared_board(self.comm)
        self.runs = 0
        self.office = MpiWire(MPI.COMM_WORLD.Dup(), self.size, self.board, lambda request: f"the results of rank {request.peer}")
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(line_buffering=True, write_through=False)    # whole lines, also of a rank that is ended
        atexit.register(self.board.end, True)

    def run(self, program, size: int, *args) -> list:
        """program(wire, *args) on ranks 0 to size - 1, while the others wait; the list of results, on every process.

        What a rank raises, SystemExit too, ends all ranks with exit status 1.
        """
        if not 1 <= size <= self.size:
            raise ValueError(f"run: {size} ranks were asked for; mpiexec started {self.size}")
        with ending_all():
            return Context().run(self._run, program, size, args)

    def _run(self, program, size, args):
        self.runs += 1
        wire = MpiWire(self.comm, size, self.board)
        self.office.calls = wire.calls              # who has returned, and waits here, is asked what it called
        self.board.begin(self.runs, self.size, wire.calls)
        result = None
        if self.rank < size:
            result = Context().run(program, wire, *args)
            wire.close()
        outcomes = gather_objects(self.office, (result, wire.account()))
        if self.main:
            require_settled([account for _, account in outcomes])
            outcomes = [result for result, _ in outcomes[:size]]
        return share_object(self.office, outcomes)

    def leave(self, status: int):
        """End the program with `status`; called on every rank alike.

        MPI is finalized first: `python -m mpi4py` would take another status than 0 for a failure, and abort every rank aloud.
        """
        self.board.end(gone=True)
        MPI.Finalize()
        sys.exit(status)


def shared_board(comm):
    """A board for the ranks of `comm`, unless they are on several machines."""
    machine = comm.Split_type(MPI.COMM_TYPE_SHARED)
    if machine.rank == 0:
        take_segment_names()
    if machine.size < comm.size:
        return NoBoard()
    wire = MpiWire(comm, comm.size, NoBoard())
    path = share_object(wire, board.hang_up(wire.size) if wire.rank == 0 else None)
    mine = board.opened(path, wire.size, wire.rank)
    boards = share_object(wire, gather_objects(wire, type(mine)))
    if wire.rank == 0:
        board.take_name(path)
    return NoBoard() if NoBoard in boards else mine


def take_segment_names():
    """MPICH's shared memory, which MPI_Init has opened on all ranks, loses its name: ranks that are ended would leave it for ever."""
    with suppress(OSError):                         # no /proc, no MPICH: nothing to take
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "/dev/shm/mpich_shm_" in line and not line.endswith("(deleted)\n")}
        for path in paths:
            os.unlink(path)


@contextmanager
def ending_all():
    """Inside the block any exception of this rank, SystemExit too, ends all ranks."""
    try:
        yield
    except BaseException as error:
        end_all(error)


def end_all(error: BaseException):
    """Print why, in one write so that ranks do not mix, and end every process of the job with exit status 1."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if isinstance(error, Aborted) and error.__cause__:
        error = error.__cause__         # a deadlock, or Ctrl-C in a wait
    if isinstance(error, KeyboardInterrupt | Failed):
        end_in_a_line(error, rank)
    if isinstance(error, SystemExit):
        error.add_note(f"rank {rank} called sys.exit({error.code}) in the middle of a run")
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in WIRES:
        trace = trace.tb_next           # begin where the program begins
    text = "".join(traceback.format_exception(error.with_traceback(trace or error.__traceback__)))
    abort(f"--- rank {rank} of {size} failed; ending all ranks\n{text}", 1)


def end_in_a_line(error: KeyboardInterrupt | Failed, rank: int):
    """What needs no traceback: Ctrl-C, which comes to all ranks at once, so that all but rank 0 leave it the word; and a sentence."""
    if isinstance(error, Failed):
        abort(f"FAILED: {error}\n", 1)
    time.sleep(2 * DRAIN if rank > 0 else 0)
    abort("interrupted\n", INTERRUPTED)


def abort(text: str, status: int):
    """Print, let it arrive, and end every process of the job."""
    sys.stdout.flush()
    sys.stderr.write(text)
    sys.stderr.flush()
    time.sleep(DRAIN)
    MPI.COMM_WORLD.Abort(status)
    os._exit(status)        # where Abort comes back, and mpiexec's signal is still on its way
