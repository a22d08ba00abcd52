"""What the threaded world alone can tell: rendezvous, dtypes, buffers before their wait, the order of ranks, interrupts."""
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_wire import ping_pong

from refpar.comm.threads import ThreadWorld
from refpar.sanitizer.endings import Aborted, Deadlock


def swap(wire):
    """Send first, then receive: right only where sends are eager."""
    wire.send(np.zeros(2), 1 - wire.rank)
    wire.recv(np.empty(2), 1 - wire.rank)


def test_a_send_above_the_eager_limit_is_a_rendezvous():
    ThreadWorld(eager=16).run(swap, 2)
    with pytest.raises(Deadlock, match=r"rank 0 waits in send\(16 bytes, tag 0\) to rank 1(.|\n)*0 -> 1 -> 0$"):
        ThreadWorld(eager=15).run(swap, 2)


def another_dtype(wire):
    wire.isend(np.zeros(3, np.float32), 0).wait()
    wire.recv(np.zeros(3, np.int32), 0)


def test_another_dtype_than_was_sent():
    sentence = r"receives 3 x int32 \(12 bytes\) from rank 0, tag 0, which sent 3 x float32 \(12 bytes\)"
    with pytest.raises(ValueError, match=sentence):
        ThreadWorld().run(another_dtype, 1)


def writes_before_the_wait(wire):
    x = np.zeros(3)
    request = wire.isend(x, 0)
    x += 1
    wire.recv(np.empty(3), 0)
    request.wait()


def reads_before_the_wait(wire, factor):
    """Returns what it read too early, times a factor; or, without one, as a number of Python, which nobody can follow."""
    x, n = np.zeros(3), np.zeros(3, int)
    requests = [wire.isend(x + 5, 0), wire.isend(n + 5, 0, tag=1), wire.irecv(x, 0), wire.irecv(n, 0, tag=1)]
    early = x * factor if factor else float(x[0]), n.copy()
    for request in requests:
        request.wait()
    return early, (x, n)


@pytest.mark.parametrize("world", [ThreadWorld(), ThreadWorld(seed=1, eager=0)], ids=["eager", "rendezvous"])
def test_buffers_belong_to_the_wire_until_the_wait(world):
    with pytest.raises(ValueError, match=r"rank 0 of 1 wrote into the buffer of send\(24 bytes, tag 0\) to rank 0 before its wait"):
        world.run(writes_before_the_wait, 1)
    with pytest.raises(ValueError, match=r"rank 0 of 1 returns what was read from a receive buffer before its wait: rank 0 "
                                         r"receives float64 \[3\] from rank 0, tag 0, by  requests = .*wire.irecv\(x, 0\), "
                                         r".*  \(test_threads.py line \d+, in reads_before_the_wait\)"):
        world.run(reads_before_the_wait, 1, 2.0)
    [((x, n), (late_x, late_n))] = world.run(reads_before_the_wait, 1, None)
    assert np.isnan(x) and (n == -1).all()
    assert (late_x == 5).all() and (late_n == 5).all()


def diary(wire, lines):
    """Who wrote when: the order of ranks."""
    for _ in range(3):
        lines.append(wire.rank)
        got = wire.irecv(np.empty(1), (wire.rank - 1) % wire.size)
        wire.send(np.zeros(1), (wire.rank + 1) % wire.size)
        got.wait()


def order(**options):
    lines = []
    ThreadWorld(**options).run(diary, 4, lines)
    return tuple(lines)


def test_the_order_of_ranks_is_repeatable_and_can_be_drawn():
    assert order() == order()
    assert order(seed=5) == order(seed=5)
    assert len({order(seed=seed) for seed in range(20)}) > 10


def ring_sum(wire):
    """All ranks' numbers added in the order of the ring: rounding shows any other order."""
    mine = np.random.default_rng(wire.rank).standard_normal(50)
    total, out = mine.copy(), np.empty(50)
    for _ in range(wire.size - 1):
        got = wire.irecv(out, (wire.rank - 1) % wire.size)
        wire.send(mine, (wire.rank + 1) % wire.size)
        got.wait()
        mine = out.copy()
        total += mine
    return total


@given(st.integers(0, 10**6))
def test_every_order_gives_the_same_bits(seed):
    for drawn, usual in zip(ThreadWorld(seed).run(ring_sum, 4), ThreadWorld().run(ring_sum, 4)):
        assert drawn.tobytes() == usual.tobytes()


def raises_again(wire):
    if wire.rank == 1:
        raise Aborted("not from the world")


def test_the_first_failure_is_always_the_same():
    def two_mistakes(wire):
        if wire.rank in (1, 2):
            raise ValueError(f"mistake {wire.rank}")
        wire.recv(np.empty(1), 1)

    for _ in range(5):
        with pytest.raises(ValueError, match="mistake 1"):
            ThreadWorld().run(two_mistakes, 4)
    with pytest.raises(Aborted, match="not from the world"):
        ThreadWorld().run(raises_again, 3)


def test_worlds_in_worlds_share_nothing():
    def outer(wire):
        return ThreadWorld(seed=wire.rank).run(ping_pong, 2, 2 + wire.rank)

    assert ThreadWorld(seed=1).run(outer, 3) == [[4, 3], [6, 5], [8, 7]]


def test_the_same_exception_object():
    mistake = RuntimeError("this one")

    def raises_it(wire):
        raise mistake

    with pytest.raises(RuntimeError) as caught:
        ThreadWorld().run(raises_it, 1)
    assert caught.value is mistake


INTERRUPTED = """
import time
from refpar.comm.threads import ThreadWorld
def busy(wire):
    print("begun", flush=True)
    while True:
        time.sleep(0.01)
ThreadWorld().run(busy, 2)
"""


def test_keyboard_interrupt_ends_all_ranks():
    job = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert job.stdout.readline() == "begun\n"
    begin = time.monotonic()
    job.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in job.communicate(timeout=5)[1]
    assert time.monotonic() - begin < 5 and job.returncode != 0
