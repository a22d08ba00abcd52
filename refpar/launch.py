"""How a command gets its world, processes where mpiexec started it, threads otherwise; and how it ends.

mpiexec says what it started in environment variables, before MPI is touched.  So threads need no MPI library, and whatever is
wrong with one is said in a sentence, not by four ranks that each believe to be rank 0 of 1.

A command is a function of the world, and `launched` runs it to its end: an exit status, a sentence where one is due, and no traceback
where the world outside is the reason.  What is wrong on every rank alike it may `refuse`.
"""
from __future__ import annotations

import os
import sys
import warnings
from typing import Callable, NoReturn

from refpar.comm.threads import ThreadWorld
from refpar.comm.wire import INTERRUPTED, Failed

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")                # MPICH, Intel MPI, Slurm's pmi2; Open MPI
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")            # where srun speaks PMIx, which names no size


class LaunchError(ValueError):
    """The world cannot be started; the text says why, and what to type instead."""


def launched(program: Callable) -> int:
    """program(world) -> exit status, in the world that this process belongs to; the exit status for the shell.

    Ctrl-C is one line and 130.  A reader of our output who has seen enough (`| head`) is silence.  A disk that is full is a sentence.
    Processes end each other instead: see `comm/mpi.py`.
    """
    try:
        world = launch()
    except LaunchError as error:
        refuse(error)
    if world.kind == "processes":
        world.leave(program(world))
    try:
        status = program(world)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except (Failed, OSError) as error:
        if not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"FAILED: {error}\n")
        silence()
        return 1


def silence():
    """What is still to be printed goes nowhere: whoever reads it has gone, or it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def launch():
    """The world that this process belongs to: MpiWorld under mpiexec, else ThreadWorld.  Raises LaunchError."""
    size = started()
    if size is None:
        return ThreadWorld()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # mpi4py suspects another MPI's mpiexec; below it is said for certain
            from refpar.comm import mpi
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise LaunchError(f"mpiexec started {size} ranks, but mpi4py is not installed in {sys.executable}; type\n"
                          + commands(size)) from error
    except (ImportError, RuntimeError) as error:        # mpi4py raises RuntimeError when it cannot load an MPI library
        raise LaunchError(f"mpiexec started {size} ranks, but mpi4py finds no MPI library ({error}); type\n"
                          + commands(size)) from error
    if mpi.world_size() != size:
        raise LaunchError(f"mpiexec started {size} ranks, but {mpi.library()} sees {mpi.world_size()}: this mpiexec belongs to "
                          f"another MPI; use the one beside this Python\n" + commands(size))
    return mpi.MpiWorld()


def started() -> int | None:
    """How many ranks mpiexec, or srun, started, this process among them; None where nobody did."""
    sizes = SIZES + SLURM if "PMIX_RANK" in os.environ else SIZES
    name = next((name for name in sizes if name in os.environ), None)
    if name is not None and not os.environ[name].isdecimal():
        raise LaunchError(f"{name}={os.environ[name]!r} must be the number of ranks that mpiexec started")
    return None if name is None else int(os.environ[name])


def refuse(error: Exception | str, world=None) -> NoReturn:
    """Print the sentence, once for all ranks, and end with exit status 2.  Called on every rank alike."""
    first = world.main if world else next((os.environ[name] for name in RANKS if name in os.environ), "0") == "0"
    if first:
        sys.stderr.write(f"{os.path.basename(sys.argv[0]).replace('__main__.py', 'refpar')}: {error}\n")
        sys.stderr.flush()
    if world:
        world.leave(2)
    sys.exit(2)


def commands(size: int) -> str:
    """The two lines to type that make the ranks of this program real processes."""
    script = sys.argv[0] if os.path.basename(sys.argv[0]) not in ("__main__.py", "refpar") else "-m refpar"
    mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return (f"  {short(sys.executable)} -m pip install mpich mpi4py\n"
            f"  {short(mpiexec)} -n {size} {short(sys.executable)} -m mpi4py {' '.join([script, *sys.argv[1:]])}")


def short(path: str) -> str:
    """A path as seen from here, if it is below."""
    return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
