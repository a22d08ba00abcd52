"""Commands as a user starts them: `python -m refpar ...`, alone or by mpiexec, in a folder of their own."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pool.mpipool import ENVIRONMENT, missing, mpiexec

ROOT = Path(__file__).parents[1]


def require_mpi():
    """Without MPI: skip, or fail where REFPAR_REQUIRE_MPI=1 says that it must be there."""
    if missing():
        (pytest.fail if os.environ.get("REFPAR_REQUIRE_MPI") == "1" else pytest.skip)(missing())


def start(folder, *words: str, ranks: int | None = None) -> subprocess.Popen:
    """Start a command, on so many processes of mpiexec if `ranks` says so."""
    command = [sys.executable, "-m", "refpar"]
    if ranks is not None:
        command = [mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py", "-m", "refpar"]
    return subprocess.Popen([*command, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)})


def ended(process: subprocess.Popen, seconds: float = 60) -> tuple[int, str, str]:
    """Wait for its end: exit status, stdout, stderr."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate(timeout=10)
        raise
    return process.returncode, out, err
