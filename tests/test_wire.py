"""The wire: what is sent arrives, on threads and on MPI ranks, and what cannot is said in words."""
import sys
from contextvars import ContextVar
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from drawn import check
from hypothesis import given
from hypothesis import strategies as st

from refpar import watch
from refpar.comm.threads import ThreadWorld
from refpar.comm.wire import LIMIT, gather_objects, pieces, recv_object, send_object, share_object
from refpar.sanitizer.endings import Deadlock, Leftover
from refpar.sanitizer.report import cycle

DTYPES = ["float64", "float32", "int64", "uint8", "bool", "complex128"]
SHAPES = [(), (0,), (1,), (3, 0, 2), (5,), (2, 3), (9, 1, 4)]


# What is sent arrives.

class Mail(NamedTuple):
    source: int
    to: int
    tag: int
    shape: tuple
    dtype: str


class Traffic(NamedTuple):
    """Messages between `size` ranks, each rank posting and waiting in an order of its own."""
    size: int
    mails: list
    seed: int
    limit: int      # bytes of a piece, on MPI


@st.composite
def traffics(draw):
    size = draw(st.integers(1, 4))
    rank = st.integers(0, size - 1)
    mail = st.builds(Mail, rank, rank, st.integers(0, 1), st.sampled_from(SHAPES), st.sampled_from(DTYPES))
    return Traffic(size, draw(st.lists(mail, max_size=12)), draw(st.integers(0, 99)), draw(st.sampled_from([7, LIMIT])))


def content(number, mail):
    """What mail `number` says."""
    return (np.random.default_rng(number).integers(0, 100, mail.shape)).astype(mail.dtype)


def exchange(wire, traffic):
    """Post every send and receive of this rank, then wait for all; the number of each mail received, with its array."""
    wire.limit = traffic.limit
    random = np.random.default_rng([traffic.seed, wire.rank])
    posts = [(number, mail, way) for number, mail in enumerate(traffic.mails) for way in ("send", "recv")
             if wire.rank == (mail.source if way == "send" else mail.to)]
    lanes = sorted({(mail.source, mail.to, mail.tag, way) for _, mail, way in posts})
    requests, received = [], {}
    for lane in random.permutation([lanes.index((m.source, m.to, m.tag, way)) for _, m, way in posts]).tolist():
        number, mail, way = posts.pop(next(i for i, (_, m, w) in enumerate(posts) if (m.source, m.to, m.tag, w) == lanes[lane]))
        if way == "send":
            requests.append(wire.isend(content(number, mail), mail.to, mail.tag))
        else:
            received[number] = np.empty(mail.shape, mail.dtype)
            requests.append(wire.irecv(received[number], mail.source, mail.tag))
    for request in random.permutation(len(requests)):
        requests[request].wait()
    return received


def mail_arrives(world, traffic):
    """Every mail arrives whole, and those of one lane in the order of posting."""
    received = {}
    for got in world.run(exchange, traffic.size, traffic):
        received |= got
    assert len(received) == len(traffic.mails)
    for number, mail in enumerate(traffic.mails):
        assert np.array_equal(received[number], content(number, mail)), f"mail {number} of {traffic}"


def test_mail_arrives(world):
    check(world, mail_arrives, traffics(), examples=200)


def ping_pong(wire, times):
    """Rank 0 and rank 1 add one in turn."""
    x = np.zeros(1)
    for _ in range(times):
        if wire.rank == 0:
            wire.send(x + 1, 1)
            wire.recv(x, 1)
        else:
            wire.recv(x, 0)
            wire.send(x + 1, 0)
    return float(x[0])


def test_ping_pong(world):
    assert world.run(ping_pong, 2, 50) == [100, 99]


def talk(wire):
    """Objects to the next rank, to rank 0, and from rank 1 to all."""
    send_object(wire, {"from": wire.rank}, (wire.rank + 1) % wire.size)
    before = recv_object(wire, (wire.rank - 1) % wire.size)
    return before["from"], gather_objects(wire, wire.rank**2), share_object(wire, [wire.rank], root=wire.size - 1)


@pytest.mark.parametrize("size", [1, 3])
def test_objects(world, size):
    squares = [rank**2 for rank in range(size)]
    assert world.run(talk, size) == [((rank - 1) % size, None if rank else squares, [size - 1]) for rank in range(size)]


def booked(wire):
    """A ledger's view of one message each way."""
    ledger = watch.Ledger()
    with watch.watching(ledger), watch.errand("dp", "ring"):
        got = wire.irecv(np.empty(2 + wire.rank), 1 - wire.rank)
        wire.send(np.zeros(3 - wire.rank), 1 - wire.rank)
        got.wait()
    return dict(ledger.messages), dict(ledger.bytes), ledger.sent("dp")


def test_observers_are_told(world):
    keys = ("send", "dp", "ring"), ("recv", "dp", "ring")
    for rank, (messages, nbytes, sent) in enumerate(world.run(booked, 2)):
        assert messages == dict.fromkeys(keys, 1)
        assert nbytes == dict(zip(keys, (24 - 8 * rank, 16 + 8 * rank)))
        assert sent == (1, 24 - 8 * rank)


setting = ContextVar("setting", default=0)


def set_and_get(wire):
    was = setting.get()
    setting.set(wire.rank + 1)
    return was


def test_each_program_has_a_fresh_context(world):
    assert world.run(set_and_get, 3) == [0, 0, 0] == world.run(set_and_get, 3)


@given(st.integers(0, 2**40), st.integers(1, 2**31 - 1))
def test_pieces_cover_a_message(nbytes, limit):
    if nbytes // limit > 1000:
        limit = nbytes // 1000
    cut = pieces(np.int64(nbytes), limit)
    assert cut[0][0] == 0 and cut[-1][1] == nbytes
    assert all(stop == start for (_, stop), (start, _) in pairwise(cut))
    assert all(type(end) is int and 0 <= stop - start <= limit for start, stop in cut for end in (start, stop))
    assert all(stop > start for start, stop in cut) or cut == [(0, 0)]


# What cannot arrive is said in words.

def wait_in_a_ring(wire):
    wire.recv(np.empty(2), (wire.rank + 1) % wire.size)


def wait_for_one_that_returns(wire):
    if wire.rank == 1:
        wire.recv(np.empty(2), 0, tag=3)


def other_tag(wire):
    if wire.rank == 0:
        wire.send(np.zeros(1), 1, tag=6)
    wire.recv(np.empty(2), 1 - wire.rank)


def test_deadlock_names_who_waits_for_whom(world):
    with pytest.raises(Deadlock) as caught:
        world.run(wait_in_a_ring, 3)
    text = str(caught.value)
    for rank in range(3):
        assert f"rank {rank} waits in recv(16 bytes, tag 0) from rank {(rank + 1) % 3}  (test_wire.py line " in text
    assert "in wait_in_a_ring" in text
    assert "each waits for the next: 0 -> 1 -> 2 -> 0" in text


def test_waiting_for_a_rank_that_has_returned(world):
    with pytest.raises(Deadlock) as caught:
        world.run(wait_for_one_that_returns, 2)
    assert "rank 1 waits in recv(16 bytes, tag 3) from rank 0, which has returned" in str(caught.value)
    assert "rank 0 has returned" in str(caught.value)


def test_unreceived_messages_are_part_of_the_report():
    with pytest.raises(Deadlock, match="sent but not received: 1 message from rank 0 to rank 1, tag 6, 8 bytes"):
        ThreadWorld().run(other_tag, 2)


def raises(wire):
    if wire.rank == 2:
        raise KeyError("a mistake")
    wire.recv(np.empty(1), 2)


def swallows(wire):
    try:
        raises(wire)
    except Exception:
        return "went on"


def exits(wire):
    if wire.rank == 1:
        sys.exit(0)
    wire.recv(np.empty(1), 1)


def test_the_exception_of_a_rank_is_what_the_caller_sees(world):
    for _ in range(3):
        with pytest.raises(KeyError, match="a mistake") as caught:
            world.run(raises, 4)
        assert caught.value.__notes__[0].startswith("[raised on rank 2 of 4]")
    assert world.run(ping_pong, 2, 3) == [6, 5]


def test_no_rank_can_swallow_the_end(world):
    with pytest.raises(Deadlock, match="rank 0 waits in recv"):      # rank 2 swallows its own mistake and returns
        world.run(swallows, 3)


def test_sys_exit_in_a_rank_is_a_failure(world):
    with pytest.raises(RuntimeError, match=r"sys.exit\(0\) in the middle of a run"):
        world.run(exits, 2)


def sends_too_much(wire):
    for _ in range(2 - wire.rank):
        wire.send(np.zeros(3), 0, tag=5)
    if wire.rank == 0:
        wire.recv(np.empty(3), 1, tag=5)


def never_waits(wire):
    wire.irecv(np.empty(3), 0)


def waits_twice(wire):
    request = wire.isend(np.zeros(1), 0)
    wire.recv(np.empty(1), 0)
    request.wait()
    request.wait()


def expects_another_size(wire, size):
    if wire.rank == 0:
        wire.send(np.zeros(3), 1)
    else:
        wire.recv(np.empty(size), 0)


def test_leftover_messages_are_an_error(world):
    with pytest.raises(Leftover, match="nobody received\n  2 messages from rank 0 to rank 0, tag 5, 48 bytes$"):
        world.run(sends_too_much, 2)
    assert world.run(ping_pong, 2, 3) == [6, 5]


def test_every_request_is_waited_for_once(world):
    with pytest.raises(Leftover, match=r"rank 0 of 1 returned without waiting for recv\(24 bytes, tag 0\) from rank 0"):
        world.run(never_waits, 1)
    with pytest.raises(ValueError, match=r"wait\(\) was called twice on send\(8 bytes, tag 0\) to rank 0"):
        world.run(waits_twice, 1)


@pytest.mark.parametrize("size", [0, 2, 4])
def test_another_size_than_was_sent(world, size):
    with pytest.raises(ValueError, match=f"rank 1 of 2.*{size * 8} bytes"):
        world.run(expects_another_size, 2, size)


def at_the_door(wire, mistake):
    x = np.zeros((4, 4))
    if mistake == "strides":
        wire.send(x[:, 0], 0)
    if mistake == "list":
        wire.send([1, 2], 0)
    if mistake == "objects":
        wire.send(np.array([None]), 0)
    if mistake == "read-only":
        x.flags.writeable = False
        wire.recv(x, 0)
    if mistake == "peer":
        wire.send(x, wire.size)
    if mistake == "negative peer":
        wire.recv(x, -1)
    if mistake == "tag":
        wire.send(x, 0, tag=-1)


@pytest.mark.parametrize("mistake, sentence", [
    ("strides", r"rank 0 of 1: send needs a C-contiguous array; this one has shape \(4,\) and strides \(32,\)"),
    ("list", "send needs a numpy array of numbers, not list"), ("objects", "send needs a numpy array of numbers"),
    ("read-only", r"recv cannot write into a read-only array of shape \(4, 4\)"),
    ("peer", "send names rank 1; ranks are 0 to 0"), ("negative peer", "recv names rank -1"), ("tag", "send has tag -1"),
])
def test_mistakes_at_the_door(world, mistake, sentence):
    with pytest.raises(ValueError, match=sentence):
        world.run(at_the_door, 1, mistake)


def test_sizes_of_a_world(world):
    with pytest.raises(ValueError, match="run: "):
        world.run(ping_pong, 0, 1)


def test_cycle():
    assert cycle({3: 1, 1: 2, 2: 1}) == [1, 2, 1]
    assert cycle({0: 1, 1: 2}) == []
    assert cycle({0: 0}) == [0, 0]
