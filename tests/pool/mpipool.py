"""Programs on real MPI ranks, from one plain pytest process that never imports MPI.

hypothesis draws, shrinks and replays in the pytest process alone; the ranks are workers that mpiexec starts once, at the first
program, and that are driven over Unix sockets.  An empty program on 4 ranks takes a fraction of a millisecond.  A program that
fails costs milliseconds and no restart; when a rank dies or is stuck, the workers are started anew at the next program.
"""
import importlib.util
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

from pool.line import Line
from refpar.sanitizer.endings import require_settled

RENEWALS = 200      # communicators are scarce: so many failed programs, then new workers
ENVIRONMENT = {     # what Open MPI wants for more ranks than cores, and for root; no other MPI minds
    "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OPENBLAS_NUM_THREADS": "1",
}


def mpiexec() -> str | None:
    """The mpiexec of this Python: the one beside it, else the one on PATH."""
    return shutil.which("mpiexec", path=os.path.dirname(sys.executable)) or shutil.which("mpiexec")


def missing() -> str | None:
    """What is not there for MPI ranks, in a sentence; None where all is."""
    if mpiexec() and importlib.util.find_spec("mpi4py"):
        return None
    return f"no real MPI ranks: {'mpi4py' if mpiexec() else 'mpiexec'} is missing; pip install mpich mpi4py"


class PoolWorld:
    """Runs programs on ranks that are processes, at most `size`; the same calls as ThreadWorld and MpiWorld."""
    kind = "processes"
    main = True

    def __init__(self, size: int = 4, timeout: float = 60.0):
        self.size = size
        self.timeout = timeout      # seconds that one program may take
        self.process = None
        self.lines = []             # of each rank
        self.pids = []
        self.runs = 0
        self.renewals = 0

    def run(self, program, size: int, *args) -> list:
        """program(wire, *args) on ranks 0 to size - 1; their results.  program is pickled by reference: a function of a module.

        What a rank raises is raised here, of the same type, with the rank and its traceback as a note.
        """
        if not 1 <= size <= self.size:
            raise ValueError(f"run: {size} ranks were asked for; the pool has {self.size}")
        self.runs += 1
        job = self.runs, size, pickle.dumps((program, args), pickle.HIGHEST_PROTOCOL)
        if self.process is None:
            self._start()
        answers = self._ask(range(size), job)
        errors = [told for outcome, told in answers if outcome == "failed"]
        if errors:
            self._renew()
            raise errors[0]
        try:
            require_settled([account for _, (_, account) in answers])
        except Exception:
            self._renew()
            raise
        return [pickle.loads(pickled) for _, (pickled, _) in answers]

    def close(self):
        """End the workers."""
        for line in self.lines:
            line.socket.close()         # a worker that sleeps ends by itself
        if self.process is not None:
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self._kill()
            shutil.rmtree(self.folder, ignore_errors=True)
        self.process, self.lines, self.pids = None, [], []

    def _start(self):
        self.folder = tempfile.mkdtemp(prefix="refpar-pool-")
        path = os.path.join(self.folder, "socket")
        with socket.socket(socket.AF_UNIX) as door, open(os.path.join(self.folder, "log"), "wb") as log:
            door.bind(path)
            door.listen(self.size)
            door.settimeout(0.2)
            worker = os.path.join(os.path.dirname(__file__), "worker.py")
            self.process = subprocess.Popen([mpiexec(), "-n", str(self.size), sys.executable, worker, path], stdout=log,
                                            stderr=log, stdin=subprocess.DEVNULL, env=os.environ | ENVIRONMENT,
                                            start_new_session=True)
            lines = [self._accept(door) for _ in range(self.size)]
        for line in lines:
            line.give(sys.path)
        ranks = {rank: (line, pid) for line in lines for rank, pid in [line.take()]}
        self.lines = [ranks[rank][0] for rank in range(self.size)]
        self.pids = [ranks[rank][1] for rank in range(self.size)]
        self.renewals = 0

    def _accept(self, door):
        """One worker's line, unless mpiexec gives up first."""
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                end = door.accept()[0]
                end.settimeout(self.timeout)
                return Line(end)
            except TimeoutError:
                pass
        raise self._broken("mpiexec did not start the workers")

    def _ask(self, ranks, job) -> list:
        """Give every one of `ranks` the job; their answers in order.  A rank that dies, or takes too long, ends the workers."""
        try:
            for rank in ranks:
                self.lines[rank].give(job)
            answers = {}
            deadline = time.monotonic() + self.timeout
            while len(answers) < len(ranks):
                silent = [rank for rank in ranks if rank not in answers]
                ready, _, _ = select.select([self.lines[rank] for rank in silent], [], [], deadline - time.monotonic())
                if not ready:
                    raise self._stuck(silent)
                for rank in silent:
                    if self.lines[rank] in ready:
                        answers[rank] = self.lines[rank].take()
        except (EOFError, OSError) as gone:
            raise self._broken(f"rank {rank} of {len(ranks)} died in the middle of a run") from gone
        return [answers[rank] for rank in ranks]

    def _renew(self):
        """After a failure: a communicator without late messages."""
        self.renewals += 1
        if self.renewals > RENEWALS:
            self.close()
        elif self.process is not None:
            self._ask(range(self.size), None)

    def _stuck(self, ranks):
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)        # it writes its stack
        time.sleep(0.5)
        return self._broken(f"ranks {ranks} took longer than {self.timeout} seconds")

    def _broken(self, sentence) -> RuntimeError:
        """End the workers; an error that shows the end of what they printed."""
        self._kill()
        with open(os.path.join(self.folder, "log"), errors="replace") as log:
            told = log.read()[-3000:]
        self.close()
        return RuntimeError(f"{sentence}\n{told}".rstrip())

    def _kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGTERM)     # mpiexec takes its ranks with it
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        except ProcessLookupError:
            pass
