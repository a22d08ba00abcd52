"""Wrong programs are reported, every drawn one: collectives that are not the same on all ranks, and buffers used before their wait.

On threads at once and by name.  On processes in words too, where anything waits or lengths differ, and at the end of the run if
all went on in peace.  (That no right program is reported is what all other tests say: they run on the same wires.)
"""
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from drawn import check
from hypothesis import assume
from hypothesis import strategies as st
from strategies_comm import situations

from refpar import watch
from refpar.comm import collectives, trees
from refpar.comm.mesh import Axis, Mesh, groups
from refpar.comm.threads import ThreadWorld
from refpar.config import Layout
from refpar.oracle.cases_comm import CASES
from refpar.oracle.situation_comm import CommSituation
from refpar.sanitizer.calls import REMEMBERED, Mismatch
from refpar.sanitizer.endings import Deadlock

ROOTED = {"broadcast", "reduce", "gather", "scatter"}
CUT = {"reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"}


class Wrong(NamedTuple):
    """All ranks make `calls`, but some ranks of one group make `others` there; both are (name of a collective, its situation)."""
    situation: CommSituation
    kind: str
    calls: tuple
    others: tuple
    ranks: tuple


@st.composite
def wrong_programs(draw, most):
    s = draw(situations(most).filter(lambda s: s.size > 1))
    kind = draw(st.sampled_from(["operation", "dtype", "shape", "root", "dim", "left out", "swapped"]))
    able = {"dtype": set(CASES) - {"barrier"}, "shape": set(CASES) - {"barrier"}, "root": ROOTED, "dim": CUT}.get(kind, set(CASES))
    name, another = draw(st.permutations(sorted(able)))[0], draw(st.sampled_from(sorted(CASES)))
    before = draw(st.lists(st.sampled_from(sorted(CASES)), max_size=3))
    group = draw(st.sampled_from(groups(s.layout, *s.axes)))
    ranks = draw(st.lists(st.sampled_from(group), min_size=1, max_size=len(group) - 1, unique=True))
    calls = [(name, s)]
    if kind in ("operation", "swapped"):
        assume(another != name)
        others = [(another, s)]
        if kind == "swapped":
            calls, others = calls + others, others + calls
    else:
        others = [(name, changed(s, kind))] if kind != "left out" else []
    first = [(one, s) for one in before]
    return Wrong(s, kind, (*first, *calls), (*first, *others), tuple(ranks))


def changed(s, kind):
    """The situation of those who are wrong."""
    if kind == "dtype":
        return replace(s, dtype="int64" if s.dtype != "int64" else "float64")
    if kind == "root":
        return replace(s, root=(s.root + 1) % s.size)
    if kind == "dim":
        return replace(s, dim=s.other, sizes=s.other_sizes, other=s.dim, other_sizes=s.sizes)
    shape, sizes = list(s.shape), list(s.other_sizes)
    shape[s.other] += 1
    sizes[0] += 1
    return replace(s, shape=tuple(shape), other_sizes=tuple(sizes))


def follow(wire, wrong):
    axis = Mesh(wrong.situation.layout, wire).axis(*wrong.situation.axes)
    for number, (name, s) in enumerate(wrong.others if wire.rank in wrong.ranks else wrong.calls):
        CASES[name].run(CASES[name].given(s, axis.index, number), axis, s)


def mismatch_is_told(world, wrong):
    """On threads as a Mismatch before any message of the wrong call, with a rank of each kind, what they called and where."""
    alone = wrong.kind == "left out"
    at_once = Mismatch if not alone else (Mismatch, Deadlock)
    with pytest.raises(at_once if world.kind == "threads" else (ValueError, Deadlock)) as caught:
        world.run(follow, wrong.situation.ranks, wrong)
    told = str(caught.value)
    group = next(group for group in groups(wrong.situation.layout, *wrong.situation.axes) if wrong.ranks[0] in group)
    right = [rank for rank in group if rank not in wrong.ranks]
    if world.kind == "threads" and not alone:
        assert any(f"  rank {rank} calls " in told for rank in right), told
        assert any(f"  rank {rank} calls " in told for rank in wrong.ranks), told
        assert f"their calls number {len(wrong.calls) - (1 + (wrong.kind == 'swapped')) + 1} there differ in " in told, told
        assert "cases_comm.py line " in told, told
    else:
        assert any(f"rank {rank} " in told for rank in range(wrong.situation.ranks)), told


def test_mismatch_is_told(world):
    check(world, mismatch_is_told, wrong_programs(world.size or 6), examples=120 if world.kind == "threads" else 12)


# What is said.

def other_dtype(wire):
    axis = Axis.world(wire)
    collectives.barrier(axis)
    collectives.all_reduce(np.ones(3, np.float32 if wire.rank == 1 else np.float64), axis)


def other_call(wire):
    axis = Mesh(Layout(dp=2), wire).axis("dp")
    if wire.rank == 1:
        trees.broadcast(np.ones(3, np.float32), axis)
    else:
        collectives.all_reduce(np.ones(12, np.float32), axis)


def other_root(wire):
    trees.reduce(np.ones(3), Axis.world(wire), root=wire.rank)


def unequal_blocks(wire):
    rows = 3 + wire.rank
    collectives.exchange([np.ones((rows, 2))] * 2, Axis.world(wire), [(rows, 2)] * 2)


def one_less(wire):
    axis = Axis.world(wire)
    for _ in range(2 - wire.rank):
        trees.broadcast(np.ones(3), axis)


def silent(wire):
    """As many bytes in as many messages: only the numbers come out wrong."""
    collectives.all_reduce(np.ones(4, np.int64 if wire.rank else np.float64), Axis.world(wire))


def long_ago(wire):
    silent(wire)
    for _ in range(REMEMBERED):
        collectives.barrier(Axis.world(wire))


def silent_message(wire):
    if wire.rank:
        wire.send(np.ones(2), 0, tag=3)
    else:
        wire.recv(np.empty(2, np.int64), 1, tag=3)


SAID = {
    other_call: [r"mismatch: ranks 0 and 1 must make the same calls on dp, and their calls number 1 there differ in operation",
                 r"rank 0 calls all_reduce on dp\(float32 \[12\], op add\)  \(test_sanitizer.py line \d+, in other_call\)",
                 r"rank 1 calls broadcast on dp\(float32 \[3\], root 0\)  \(test_sanitizer.py line \d+, in other_call\)"],
    other_root: ["differ in root",
                 r"rank 1 calls reduce on world\(float64 \[3\], root 1, op add\)  \(test_sanitizer.py line \d+, in other_root\)"],
    one_less: [r"mismatch: ranks 0 and 1 must make the same calls on world, and not all have made as many",
               r"rank 0 made 2, the last broadcast on world\(float64 \[3\], root 0\)  \(test_sanitizer.py",
               "rank 1 made 1, the last broadcast"],
    silent: ["calls number 1 there differ in dtype", r"rank 0 calls all_reduce on world\(float64 \[4\], op add\)",
             r"rank 1 calls all_reduce on world\(int64 \[4\], op add\)"],
}


@pytest.mark.parametrize("program", SAID, ids=lambda program: program.__name__)
def test_what_is_said_on_both_wires(world, program):
    with pytest.raises((Mismatch, Deadlock)) as caught:
        world.run(program, 2)
    for sentence in SAID[program]:
        assert caught.match(sentence)


def test_what_is_said_on_threads():
    with pytest.raises(Mismatch, match=r"ranks 0, 1 and 2 must .* world, and their calls number 2 there differ in dtype"):
        ThreadWorld().run(other_dtype, 3)
    with pytest.raises(Mismatch, match=r"differ in what ranks 0 and 1 exchange\n  rank 0 calls exchange on world\(float64 "
                                       r"\[\[3, 2\], \[3, 2\]\], takes \[\[3, 2\], \[3, 2\]\]\)"):
        ThreadWorld().run(unequal_blocks, 2)


def test_what_only_processes_miss_at_first(pool):
    with pytest.raises(Mismatch, match="ranks 0 and 1 have made 9 calls each on world, and not the same ones; of their last 8"):
        pool.run(long_ago, 2)
    with pytest.raises(Mismatch, match="not every message .* dtype .*\n  of 1 message from rank 1 to rank 0, tag 3, 16 bytes"):
        pool.run(silent_message, 2)
    with pytest.raises(ValueError, match=r"rank \d of 2 .*, for exchange on world\(.*\)  \(test_sanitizer.py line"):
        pool.run(unequal_blocks, 2)


# Messages that meet the wrong receive.

def collective_meets_message(wire):
    if wire.rank == 0:
        wire.send(np.ones(3), 1)
    else:
        trees.broadcast(np.ones(3), Axis.world(wire))


def two_axes(wire):
    """The same two ranks, on two axes."""
    mesh = Mesh(Layout(dp=2, tp=2), wire)
    axis = mesh.axis("dp", "tp") if wire.rank == 1 else mesh.axis("tp")
    if wire.rank < 2:
        (axis.send if wire.rank else axis.recv)(np.ones(3), 1 - wire.rank)


@pytest.mark.parametrize("program, ends", [
    (collective_meets_message, [r"rank 0 sends 3 x float64 \(24 bytes\)  \(.*in collective_meets_message\), for no collective",
                                r"rank 1 receives 3 x float64 \(24 bytes\)  \(trees.py .*\), for broadcast on world\(.*\)  \("]),
    (two_axes, [r"rank 1 sends .*, on dp\+tp", "rank 0 receives .*, on tp"])], ids=["collective", "axes"])
def test_a_message_that_meets_the_wrong_receive(program, ends):
    with pytest.raises(Mismatch, match="mismatch: a message meets a receive that does not belong to it") as caught:
        ThreadWorld().run(program, 4)
    for end in ends:
        assert caught.match(end)


def wrong_tag(wire):
    if wire.rank:
        wire.send(np.ones(3), 0, tag=4)
    else:
        wire.recv(np.ones(3), 1, tag=5)


def wrong_peer(wire):
    if wire.rank == 1:
        wire.send(np.ones(3), 0)
    if wire.rank == 0:
        wire.recv(np.ones(3), 2)


def test_wrong_tag_and_wrong_peer():
    lies = r"sent but not received: 1 message from rank 1 to rank 0, tag {}, 24 bytes  \(.* line \d+, in {}\); rank 0 waits for "
    with pytest.raises(Deadlock, match=lies.format(4, "wrong_tag") + "tag 5"):
        ThreadWorld().run(wrong_tag, 2)
    with pytest.raises(Deadlock, match=lies.format(0, "wrong_peer") + "a message from rank 2"):
        ThreadWorld().run(wrong_peer, 3)


# Buffers before their wait.

class Misuse(NamedTuple):
    kind: str
    shape: tuple
    place: int
    dtype: str
    rank: int


@st.composite
def misuses(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    return Misuse(draw(st.sampled_from(["sent", "received", "read and sent", "read and returned"])), shape,
                  draw(st.integers(0, int(np.prod(shape)) - 1)), draw(st.sampled_from(["float64", "float32", "complex64"])),
                  draw(st.integers(0, 1)))


def misusing(wire, misuse):
    """Both ranks exchange an array; one of them uses a buffer too early."""
    kind = misuse.kind if wire.rank == misuse.rank else None
    kept, out = np.ones(misuse.shape, misuse.dtype), np.empty(misuse.shape, misuse.dtype)
    coming, going = wire.irecv(out, 1 - wire.rank), wire.isend(kept, 1 - wire.rank)
    if kind in ("sent", "received"):
        (kept if kind == "sent" else out).flat[misuse.place] = 7
    read = np.array(out.flat[misuse.place:misuse.place + 1]) * 2 - 1 if kind else np.ones(1, misuse.dtype)
    for request in (coming, going):
        request.wait()
    if misuse.kind == "read and sent":
        (wire.send if wire.rank == misuse.rank else wire.recv)(read, 1 - wire.rank)
    return {"read": [read]} if misuse.kind == "read and returned" else None


def misuse_is_told(world, misuse):
    with pytest.raises(ValueError) as caught:
        world.run(misusing, 2, misuse)
    like = rf"{misuse.dtype} \[{', '.join(map(str, misuse.shape))}\]"
    wrote = rf"rank {misuse.rank} of 2 wrote into the buffer of {{}}.* before its wait: {{}}, {like}"
    read = rf"rank {misuse.rank} of 2 {{}} what was read from a receive buffer before its wait: rank {misuse.rank} receives " \
           rf"{like} from rank {1 - misuse.rank}, tag 0, by  coming, going = wire.irecv\(out, .* line \d+, in misusing"
    assert caught.match({"sent": wrote.format("send", "kept") + r", and element \[.*\] was \(?1.* and is \(?7",
                         "received": wrote.format("recv", "out"), "read and sent": read.format("sends to rank ."),
                         "read and returned": read.format("returns")}[misuse.kind])


def test_misuse_is_told():
    check(ThreadWorld(), misuse_is_told, misuses(), examples=60)


# Errands.

def waits_elsewhere(wire):
    """Posted on an axis, waited for on another."""
    mesh, got = Mesh(Layout(dp=2), wire), np.empty(2)
    with watch.watching(watch.Ledger()) as ledger:
        coming = mesh.axis("dp").irecv(got, 1 - wire.rank)
        going = mesh.axis("dp").isend(np.zeros(2), 1 - wire.rank)
        with watch.errand("tp", "another"):
            coming.wait()
            going.wait()
    return dict(ledger.messages)


def test_a_message_is_booked_where_it_was_posted(world):
    for messages in world.run(waits_elsewhere, 2):
        assert messages == {("send", "dp", None): 1, ("recv", "dp", None): 1}
