"""Every collective: what it means, what it sends, how it rounds, and what it refuses; on both worlds."""
import math

import numpy as np
import pytest
from drawn import check, first
from strategies_comm import EXAMPLES, MOST, THIRDS, situations

from refpar import watch
from refpar.algorithms import ALGORITHMS
from refpar.algorithms.gather import gather, scatter
from refpar.comm import collectives, trees
from refpar.comm.mesh import Axis, Mesh, groups, nodes
from refpar.comm.threads import ThreadWorld
from refpar.config import Layout, shares
from refpar.oracle import properties_comm
from refpar.oracle.cases_comm import CASES
from refpar.oracle.situation_comm import CommSituation
from refpar.plan import volume


def test_means(world):
    check(world, properties_comm.collective_means, situations(world.size or MOST), EXAMPLES)


def test_counts(world):
    check(world, properties_comm.collective_counts, situations(world.size or MOST), EXAMPLES)


def test_repeats_itself_bitwise(world):
    rounding = situations(world.size or MOST, dtypes=("float64", "float32", "float16"))
    check(world, properties_comm.bitwise_repeatable, rounding, EXAMPLES)


def uneven(p: int) -> CommSituation:
    """p ranks, of which a node has 2 or 3 and the last one fewer, and no two dims cut alike."""
    sizes, other_sizes = tuple(shares(2 * p - 1, p)), tuple(shares(p + 2, p))
    return CommSituation(Layout(dp=p), ("dp",), (2 * p - 1, p + 2), 0, sizes, 1, other_sizes, root=p // 2, node=2 + (p + 1) % 2)


@pytest.mark.parametrize("p", range(1, 9))
def test_every_algorithm_on_every_number_of_ranks(p):
    """Drawing is luck, and what an algorithm does depends on p more than on anything else."""
    properties_comm.collective_means(ThreadWorld(eager=0), uneven(p))
    properties_comm.collective_counts(ThreadWorld(seed=p), uneven(p))


def test_float16_rounds_once(world):
    check(world, properties_comm.one_rounding, situations(world.size or MOST, dtypes=("float16",)), EXAMPLES)


@pytest.mark.parametrize("nbytes", [0, 1, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 + 1, 2**40])
def test_long_messages_are_cut(nbytes):
    properties_comm.pieces_cover(ThreadWorld(), nbytes)


def program_cut_short(wire, situation):
    """Every collective, on a wire that sends no more than 7 bytes at a time."""
    wire.limit = 7
    return properties_comm.run_cases(wire, situation)


def test_every_collective_in_short_pieces(pool):
    """What is longer than MPI can count goes in pieces, which no collective and no ledger sees."""
    situation = CommSituation(Layout(dp=3), ("dp",), (5, 4), 0, (3, 0, 2), 1, (1, 2, 1))
    whole, cut = (pool.run(program, 3, situation) for program in (properties_comm.run_cases, program_cut_short))
    for one, other in zip(whole, cut):
        for name in one:
            properties_comm.require_same(other[name][0], one[name][0], f"{name} in pieces")
            assert other[name][1:] == one[name][1:]


def nodes_of(s):
    """The nodes on which the ranks of each group stand."""
    return [nodes(group, s.node) for group in groups(s.layout, *s.axes)]


DRAWN = situations()
CORNERS = {
    "one rank on the axis": lambda s: s.size == 1 < s.ranks,
    "one rank in the world": lambda s: s.ranks == 1,
    "uneven shards": lambda s: len(set(s.sizes)) > 2,
    "an empty shard beside a full one": lambda s: min(s.sizes) == 0 < max(s.sizes),
    "an empty shard at the root": lambda s: s.sizes[s.root] == 0 < sum(s.sizes) and s.root > 0,
    "nothing at all": lambda s: 0 in s.shape and s.size > 1,
    "more ranks than elements": lambda s: 0 < math.prod(s.shape) < s.size,
    "a root in the middle": lambda s: 0 < s.root < s.size - 1,
    "an axis that is not the world": lambda s: 1 < s.size < s.ranks,
    "ranks of a group that are no neighbours": lambda s: s.size > 1 and groups(s.layout, *s.axes)[0] != list(range(s.size)),
    "distinct sizes, 2 x 3": lambda s: sorted((s.layout.dp, s.layout.pp, s.layout.cp, s.layout.tp)) == [1, 1, 2, 3],
    "several axes as one, one of them between": lambda s: len([a for a in s.axes if getattr(s.layout, a) > 1]) == 2
    and s.size < s.ranks,
    "no power of two": lambda s: s.size in (5, 6, 7),
    "an inner dim": lambda s: s.dim == 1 and len(s.shape) == 3 and 0 not in s.shape and s.size > 1,
    "arguments that are no single run of memory": lambda s: s.strided,
    "float16": lambda s: s.dtype == "float16" and s.size > 2,
    "a maximum": lambda s: s.op == "maximum" and s.size > 2 and 0 not in s.shape,
    "a pipeline of several segments": lambda s: s.size > 2 and math.prod(s.shape) * np.dtype(s.dtype).itemsize > 4 * s.segment,
    "several nodes of several ranks": lambda s: any(len(node) > 1 < len(found) for found in nodes_of(s) for node in found),
    "nodes of unequal size": lambda s: any(len(set(map(len, found))) > 1 for found in nodes_of(s)),
}


@pytest.mark.parametrize("corner", CORNERS)
def test_the_strategy_reaches(corner):
    assert first(DRAWN, CORNERS[corner]) is not None


def test_the_thirds_are_everything():
    assert sorted(name for third in THIRDS for name in third) == sorted(CASES)


def test_a_situation_prints_as_what_makes_it():
    situation = CommSituation(dtype="float32", root=2)
    assert eval(repr(situation)) == situation


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("operation", volume.SURVEY)
def test_table_2_of_the_survey(operation, n):
    """Our formulas, for even parts, are the survey's closed forms, of the whole array and as it counts."""
    row, part = volume.SURVEY[operation], 24
    whole = n * part
    if operation == "all_to_all":
        mine = volume.all_to_all(0, [part // n] * n, [1] * n)
    else:
        mine = volume.FORMULAS[operation](0, [part] * n)
    counted = mine.elements_received if row.counts == "received by the root" else mine.elements
    assert counted == row.value(n, whole)


def program_that_refuses(wire, call):
    with watch.watching(watch.Ledger()) as ledger, pytest.raises(ValueError) as refused:
        call(Axis.world(wire))
    assert not ledger.messages
    return str(refused.value)


@pytest.mark.parametrize("call, sentence", [
    (lambda axis: collectives.reduce_scatter(np.zeros(5), axis, 1), "reduce_scatter on world: dim 1 does not exist in an array"),
    (lambda axis: collectives.reduce_scatter(np.zeros(5), axis, 0, (2, 2)), "sizes [2, 2] must be 3 lengths"),
    (lambda axis: collectives.reduce_scatter(np.zeros(5), axis, 0, (2, 2, 2)), "has length 5, and sizes [2, 2, 2] make it 6"),
    (lambda axis: collectives.all_gather(np.zeros((4, 3)), axis, -1, (2, 2, 2)), "has length 3, and sizes [2, 2, 2] make it 2"),
    (lambda axis: collectives.all_gather(np.zeros(3), axis, 0, (4, 4, -2)), "at least 0"),
    (lambda axis: collectives.all_to_all(np.zeros((3, 1)), axis, 0, None, 0, (3, 3, 3)), "split and join are both dim 0"),
    (lambda axis: collectives.exchange([np.zeros(1)], axis, [(1,)]), "1 blocks and 1 shapes must be 3"),
    (lambda axis: collectives.all_reduce(np.zeros(1), axis, algorithm="halving"),
     "all_reduce: there is no algorithm 'halving'; there are direct, doubling, ring, and any Algorithm"),
    (lambda axis: collectives.exchange([np.zeros(1)] * 3, axis, [(1,)] * 3, algorithm="bruck"), "there are direct, and any Algorithm"),
    (lambda axis: collectives.reduce(np.zeros(1), axis, root=3), "reduce on world: root 3 must be an index from 0 to 2"),
    (lambda axis: trees.broadcast(np.zeros(1), axis, root=3), "root 3 must be an index from 0 to 2"),
    (lambda axis: gather(np.zeros(1), axis, 0, (1, 1, 1), root=-1), "root -1 must be an index from 0 to 2"),
])
def test_refused_in_one_sentence_before_any_message(call, sentence):
    for told in ThreadWorld().run(program_that_refuses, 3, call):
        assert sentence in told and "\n" not in told


def program_with_numbers(wire):
    """Sums of numbers of Python, and of arrays without dims."""
    axis = Mesh(Layout(dp=wire.size), wire).axis("dp")
    return collectives.all_reduce(1.5, axis), collectives.all_reduce(np.int64(wire.rank), axis)


def test_numbers_are_arrays_without_dims():
    for half, rank in ThreadWorld().run(program_with_numbers, 3):
        assert half.shape == rank.shape == () and half == 4.5 and rank == 3 and rank.dtype == np.int64


def program_held(wire):
    """Elements of scratch and results that each collective holds at its peak."""
    axis, peaks = Axis.world(wire), {}
    x = np.ones((12, 2), np.float32)
    for name, call in {"reduce_scatter": lambda: collectives.reduce_scatter(x, axis, algorithm="ring"),
                       "all_reduce": lambda: collectives.all_reduce(x, axis, algorithm="ring"),
                       "all_gather": lambda: collectives.all_gather(x, axis, 0, [12] * axis.size, algorithm="ring"),
                       "halving": lambda: collectives.reduce_scatter(x, axis, algorithm=ALGORITHMS["reduce_scatter"]["halving"]),
                       "chain": lambda: collectives.reduce(x, axis, algorithm=ALGORITHMS["reduce"]["chain"], segment=16),
                       "float16": lambda: collectives.reduce_scatter(x.astype(np.float16), axis)}.items():
        with watch.watching(watch.Ledger()) as ledger:
            call()
        peaks[name] = ledger.peak["received"]
    return peaks


def test_what_a_collective_holds():
    """A ring needs room for two parts and its result, not for the whole of every rank."""
    for peaks in ThreadWorld().run(program_held, 4):
        assert peaks == {"reduce_scatter": 2 * 6, "all_reduce": 24, "all_gather": 4 * 24, "float16": 3 * 6,
                         "halving": 12 + 6, "chain": 4}


def program_with_template(wire):
    axis = Axis.world(wire)
    given = np.arange(10.0) if wire.rank == 1 else trees.like((10,), np.float64)
    return scatter(given, axis, 0, root=1), trees.broadcast(given, axis, root=1)


def test_who_only_receives_needs_no_array():
    for rank, (part, whole) in enumerate(ThreadWorld().run(program_with_template, 4)):
        start = sum(shares(10, 4)[:rank])
        assert part.tolist() == list(range(start, start + len(part))) and whole.tolist() == list(range(10))
        assert part.base is None
