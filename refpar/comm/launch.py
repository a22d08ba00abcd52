"""How a command gets its world: processes where mpiexec started it, threads otherwise.

mpiexec says what it started in environment variables, before MPI is touched.  So threads need no MPI library, and whatever is
wrong with one is said in a sentence, not by four ranks that each believe to be rank 0 of 1.

A command begins like this; what it then finds wrong on every rank alike it may refuse in the same way:

    try:
        world = launch()
    except LaunchError as error:
        refuse(error)
"""
from __future__ import annotations

import os
import sys
import warnings
from typing import NoReturn

from refpar.comm.threads import ThreadWorld

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")                # MPICH, Intel MPI, Slurm's pmi2; Open MPI
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")            # where srun speaks PMIx, which names no size


class LaunchError(ValueError):
    """The world cannot be started; the text says why, and what to type instead."""


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
    return next((int(os.environ[name]) for name in sizes if name in os.environ), None)


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
