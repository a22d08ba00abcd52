"""What every test shares: the fixture `world`, threads and real MPI ranks in turn, and how many cases hypothesis draws."""
import os
import signal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")      # before numpy: ranks are the parallelism here

import pytest  # noqa: E402
from drawn import CASES  # noqa: E402
from hypothesis import settings  # noqa: E402
from pool.mpipool import PoolWorld, missing  # noqa: E402

from refpar.comm.threads import ThreadWorld  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:       # as in a background job: what tests start would not hear Ctrl-C either
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("refpar", CASES)
settings.load_profile("refpar")


@pytest.fixture(scope="session")
def mpi():
    """For tests that need an MPI library: without one they are skipped; with REFPAR_REQUIRE_MPI=1 they fail."""
    why = missing()
    if why and os.environ.get("REFPAR_REQUIRE_MPI") == "1":
        pytest.fail(why)
    if why:
        pytest.skip(why)


@pytest.fixture(scope="session")
def pool(mpi):
    """Real MPI ranks, at most 4, started at the first program."""
    world = PoolWorld()
    yield world
    world.close()


@pytest.fixture(params=["threads", "processes"])
def world(request):
    """A world to run programs on: `world.run(program, size, *args)`."""
    return ThreadWorld() if request.param == "threads" else request.getfixturevalue("pool")
