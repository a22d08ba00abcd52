"""One rank of the pool: takes programs from the pytest process over a Unix socket, runs them over MPI, answers.

mpipool.py starts it as `mpiexec -n 4 python worker.py SOCKET`.  Between programs it sleeps in the socket's recv.  It uses the
same wire and board as `MpiWorld`; only a failure ends otherwise: the rank that fails says so on the board, the others stop at
their next look, and all take a new communicator, in which no late message can be mistaken for one of the next program.
"""
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from contextvars import Context

from line import Line  # worker.py's own directory is on the path of a script


def main(path):
    """Say hello, then serve until pytest has gone."""
    faulthandler.register(signal.SIGUSR1)       # a rank that is stuck shows where
    end = socket.socket(socket.AF_UNIX)
    end.connect(path)
    parent = Line(end)
    sys.path[:] = parent.take()                 # programs are pickled by reference: import them from where pytest does
    from refpar.comm.mpi import MPI, shared_board
    comm = MPI.COMM_WORLD.Dup()
    board = shared_board(comm)
    unfinished = []                             # requests of failed programs: MPI may still use their buffers
    parent.give((comm.rank, os.getpid()))
    while True:
        try:
            job = parent.take()
        except EOFError:
            os._exit(0)
        if job is None:
            comm = comm.Dup()
            parent.give("renewed")
        else:
            parent.give(answer(comm, board, unfinished, *job))


def answer(comm, board, unfinished, run, size, pickled):
    """Run program number `run`: ("returned", (pickled result, account)), ("failed", error) or ("stopped", None)."""
    from refpar.comm.mpi import MpiWire
    from refpar.sanitizer.endings import Aborted
    wire = MpiWire(comm, size, board)
    board.begin(run, size, wire.calls)
    try:
        program, args = pickle.loads(pickled)
        result = Context().run(program, wire, *args)
        wire.close()
        pickled = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        board.end()
        return "returned", (pickled, wire.account())
    except BaseException as error:
        unfinished.extend(wire.open)
        if isinstance(error, Aborted) and not error.__cause__:
            return "stopped", None
        board.stop()
        told = error.__cause__ if isinstance(error, Aborted) else error         # a deadlock, or the rank's own
        return "failed", portable(told, f"[raised on rank {wire.rank} of {size}]")


def portable(error, note):
    """An exception that survives the way to pytest: its own type where that can be pickled, its traceback as a note."""
    text = "".join(traceback.format_exception(error))
    if isinstance(error, SystemExit):
        error = RuntimeError(f"sys.exit({error.code}) in the middle of a run")
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"{note}\n{text}")
    return error


if __name__ == "__main__":
    main(sys.argv[1])
