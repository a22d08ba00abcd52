"""A program for mpiexec, as a lesson is one: what happens to the whole job when one rank does `what`.  Used by test_mpi.py."""
import os
import signal
import sys

import numpy as np

from refpar.launch import LaunchError, launch, refuse


def failing(wire, what):
    """Rank 1 does it, after a first message; the others wait for it."""
    out = np.empty(1)
    if wire.rank != 1:
        wire.recv(out, 1)
        wire.recv(out, 1)
    for rank in range(wire.size):
        if rank != 1:
            wire.send(np.zeros(1), rank)
    if what == "raise":
        raise KeyError("a mistake")
    if what == "sys.exit":
        sys.exit(0)
    if what == "os._exit":
        os._exit(3)
    if what == "os._exit 0":
        os._exit(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "endless":
        wire.recv(out, 0)


def fine(wire, factor):
    """Each rank's number and size, and a piece of a sum."""
    return wire.rank * factor, wire.size


def segments(wire):
    """The files of MPICH in shared memory that this rank has open and that still have a name."""
    with open("/proc/self/maps") as maps:
        return [line.split()[5] for line in maps if "mpich_shm" in line and "(deleted)" not in line]


def leaves_a_message(wire):
    if wire.rank == 1:
        wire.send(np.zeros(2), 0, tag=4)


def main(what):
    try:
        world = launch()
    except LaunchError as error:
        refuse(error)
    if what == "refuse":
        refuse("a mesh of 3 ranks is not 4", world)
    if what == "outside raise" and world.rank == 1:
        raise KeyError("a mistake")
    if what == "outside sys.exit" and world.rank == 1:
        sys.exit(0)
    if what == "leftover":
        world.run(leaves_a_message, world.size)
    if what == "fine":
        for size in (world.size, 1, 2):
            results = world.run(fine, size, 10)
            sys.stdout.write(f"{world.kind} {results}\n")
        world.leave(0)
    world.run(failing, world.size, what)


if __name__ == "__main__":
    main(sys.argv[1])
