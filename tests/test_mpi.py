"""Processes under mpiexec: whatever happens to one rank, the job ends at once and says why; and the pool that drives real ranks."""
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from pool.job import segments
from pool.mpipool import ENVIRONMENT, PoolWorld, mpiexec

from refpar import watch
from refpar.comm import collectives, trees
from refpar.launch import launch, started
from refpar.comm.mesh import Axis
from refpar.comm.threads import ThreadWorld

JOB = os.path.join(os.path.dirname(__file__), "pool", "job.py")
PATH = {"PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), *sys.path])}
LIMIT = 5       # seconds in which a failed job must have ended, start and all
RUN_LINES = {"plain": [], "mpi4py": ["-m", "mpi4py"]}


def job(what, run_line="plain", ranks=3):
    """Run job.py; (exit status, what it printed, seconds)."""
    begin = time.monotonic()
    done = subprocess.run([mpiexec(), "-n", str(ranks), sys.executable, *RUN_LINES[run_line], JOB, what], text=True, timeout=30,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | ENVIRONMENT | PATH)
    return done.returncode, done.stdout, time.monotonic() - begin


@pytest.mark.parametrize("run_line", RUN_LINES)
@pytest.mark.parametrize("what, sentences", [
    ("raise", ["--- rank 1 of 3 failed; ending all ranks\nTraceback", "in failing", "KeyError: 'a mistake'"]),
    ("sys.exit", ["--- rank 1 of 3 failed; ending all ranks\nTraceback", "rank 1 called sys.exit(0) in the middle of a run"]),
    ("outside raise", ["--- rank 1 of 3 failed; ending all ranks\nTraceback", "in main", "KeyError: 'a mistake'"]),
    ("outside sys.exit", ["--- rank 0 of 3 failed; ending all ranks\n", "rank 0 waits in recv(8 bytes, tag 0) from rank 1, which "
                          "has returned  (job.py line"]),
])
def test_a_failing_rank_ends_the_job(mpi, what, sentences, run_line):
    status, printed, seconds = job(what, run_line)
    assert status == 1 and seconds < LIMIT, printed
    for sentence in sentences:
        assert sentence in printed


@pytest.mark.parametrize("what", ["os._exit", "os._exit 0", "kill"])
def test_a_rank_that_dies_ends_the_job(mpi, what):
    status, printed, seconds = job(what)
    assert seconds < LIMIT, printed
    assert status != 0 or what == "os._exit 0"      # MPICH's mpiexec may take the 0 for its own


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux says which files a process has open")
def test_ranks_that_are_ended_leave_nothing_in_shared_memory(mpi):
    pool = PoolWorld(size=2)
    try:
        assert pool.run(segments, 2) == [[], []]
    finally:
        pool.close()


def test_deadlock_is_reported(mpi):
    status, printed, seconds = job("endless")
    assert status == 1 and seconds < LIMIT
    assert "--- rank 0 of 3 failed; ending all ranks" in printed
    assert "rank 0 waits in recv(8 bytes, tag 0) from rank 1  (job.py line" in printed
    assert "rank 1 waits in recv(8 bytes, tag 0) from rank 0  (job.py line" in printed
    assert "each waits for the next: 0 -> 1 -> 0" in printed


def test_leftover_messages_end_the_job(mpi):
    status, printed, _ = job("leftover")
    assert status == 1
    assert "nobody received\n  1 message from rank 1 to rank 0, tag 4, 16 bytes" in printed


@pytest.mark.parametrize("run_line", RUN_LINES)
def test_every_process_has_the_results_and_spare_ranks_wait(mpi, run_line):
    status, printed, _ = job("fine", run_line)
    assert status == 0
    assert sorted(printed.splitlines()) == sorted(3 * ["processes [(0, 3), (10, 3), (20, 3)]", "processes [(0, 1)]",
                                                       "processes [(0, 2), (10, 2)]"])


@pytest.mark.parametrize("run_line", RUN_LINES)
def test_bad_input_is_one_sentence(mpi, run_line):
    assert job("refuse", run_line)[:2] == (2, "job.py: a mesh of 3 ranks is not 4\n")


# What a command says when it cannot be started.

def start(before, **environment):
    """job.py in one process that believes to be one of several; `before` runs first."""
    code = f"import runpy, sys\nsys.argv = [{JOB!r}, 'fine']\n{before}\nrunpy.run_path({JOB!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], text=True, timeout=30, capture_output=True,
                          env=os.environ | PATH | environment)
    return done.returncode, done.stderr


WITHOUT_MPI4PY = "sys.modules['mpi4py'] = None"
RUN_LINE = f"-n 4 {sys.executable} -m mpi4py {JOB} fine\n"


def test_mpiexec_without_mpi4py():
    status, sentence = start(WITHOUT_MPI4PY, PMI_SIZE="4", PMI_RANK="0")
    assert status == 2
    assert sentence.startswith(f"job.py: mpiexec started 4 ranks, but mpi4py is not installed in {sys.executable}; type\n")
    assert "-m pip install mpich mpi4py\n" in sentence and sentence.endswith(RUN_LINE)
    assert start(WITHOUT_MPI4PY, PMI_SIZE="4", PMI_RANK="1") == (2, "")


def test_mpi4py_without_a_library(mpi):
    status, sentence = start("", PMI_SIZE="4", PMI_RANK="0", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert status == 2
    assert sentence.startswith("job.py: mpiexec started 4 ranks, but mpi4py finds no MPI library (")
    assert sentence.endswith(RUN_LINE)


def test_mpiexec_of_another_mpi(mpi):
    status, sentence = start("", OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_RANK="0")
    assert status == 2
    assert sentence.startswith("job.py: mpiexec started 4 ranks, but ")
    assert "sees 1: this mpiexec belongs to another MPI; use the one beside this Python\n" in sentence
    assert sentence.endswith(RUN_LINE)


@pytest.mark.parametrize("environment, size", [
    ({}, None), ({"PMI_SIZE": "4"}, 4), ({"OMPI_COMM_WORLD_SIZE": "2"}, 2), ({"SLURM_NTASKS": "8"}, None),
    ({"PMIX_RANK": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "3"}, 3),
])
def test_who_started_this_process(monkeypatch, environment, size):
    for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert started() == size
    if size is None:
        assert isinstance(launch(), ThreadWorld)


# Messages longer than MPI can count.

def in_small_pieces(wire, limit, shape):
    """A sum and a broadcast whose messages are cut: (their values, pieces of the longest message)."""
    wire.limit = limit
    axis = Axis.world(wire)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + wire.rank
    with watch.watching(watch.Ledger()) as ledger:
        total, whole = collectives.all_reduce(x, axis, algorithm="ring"), trees.broadcast(x, axis, root=1)
    return total, whole, ledger.sent()[0]


@pytest.mark.parametrize("limit", [1, 5, 4096, 100_000])
def test_long_messages_travel_in_pieces(pool, limit):
    """Cut at any byte, eager or not, what arrives is whole; and it still is one message to whoever counts."""
    shape = (3, 7) if limit < 10 else (300, 701)                            # 841,200 bytes
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for total, whole, messages in pool.run(in_small_pieces, 3, limit, shape):
        assert np.array_equal(total, 3 * x + 3) and np.array_equal(whole, x + 1)
        assert messages in (4, 6)                                           # 2(p-1), and the root's two


# The pool.

def pid(wire):
    return os.getpid()


def dies(wire):
    if wire.rank == 1:
        os._exit(0)
    wire.recv(np.empty(1), 1)


def sleeps(wire):
    time.sleep(wire.rank * 30)


def late(wire):
    """Rank 0 fails before it receives; the message must not be taken by the next program."""
    if wire.rank == 1:
        wire.send(np.full(1, 7.0), 0)
    else:
        raise ValueError("too early")


def receives(wire):
    out = np.empty(1)
    if wire.rank == 1:
        wire.send(np.full(1, 8.0), 0)
    else:
        wire.recv(out, 1)
    return float(out[0]) if wire.rank == 0 else None


def test_a_failed_program_costs_no_restart(pool):
    pids = pool.run(pid, 4)
    assert len(set(pids)) == 4
    for _ in range(3):
        with pytest.raises(ValueError, match="too early"):
            pool.run(late, 2)
        assert pool.run(receives, 2) == [8.0, None]
    assert pool.run(pid, 4) == pids


def test_a_dead_rank_is_noticed_and_the_pool_starts_again(pool):
    pids = pool.run(pid, 4)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank \d of 2 died in the middle of a run"):
        pool.run(dies, 2)
    assert time.monotonic() - begin < LIMIT
    assert not set(pool.run(pid, 4)) & set(pids)


def test_a_rank_that_is_stuck_shows_where(mpi):
    world = PoolWorld(size=2, timeout=3)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] took longer than 3 seconds(.|\n)*in sleeps"):
        world.run(sleeps, 2)
    world.close()


def test_programs_are_pickled_by_reference(pool):
    with pytest.raises(Exception, match="pickle"):
        pool.run(lambda wire: None, 2)


def test_a_number_of_ranks_that_is_none(mpi):
    status, sentence = start("", PMI_SIZE="abc")
    assert status == 2 and sentence == "job.py: PMI_SIZE='abc' must be the number of ranks that mpiexec started\n"
