"""What is true of every communication, on any mesh and in any situation.  A property raises one sentence, or returns.

`world` runs programs on ranks; a situation says everything else.  What a rank gets is judged outside the world, in one process.
"""
from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np

from refpar import watch
from refpar.algorithms import ALGORITHMS
from refpar.comm import collectives
from refpar.comm.mesh import Mesh, coordinates, groups, rank_at
from refpar.comm.pairs import Pair, keep
from refpar.comm.placement import dual
from refpar.oracle.placed import inner, whole
from refpar.comm.wire import pieces
from refpar.config import AXES, Layout, shares
from refpar.oracle.cases_comm import COMPOSITIONS, PAIRS, cases_of, ledger_volume, optimal, sums_of
from refpar.oracle.situation_comm import CommSituation
from refpar.plan import volume
from refpar.plan.promise import travels


def require(holds, sentence: str):
    """AssertionError with one sentence unless it holds (an `assert` is left out by `python -O`)."""
    if not holds:
        raise AssertionError(sentence)


def require_same(got, expected, what: str):
    """Bitwise equal, in dtype and shape too; lists and None as they are."""
    if isinstance(expected, list):
        require(len(got) == len(expected), f"{what}: got {len(got)} arrays, and must get {len(expected)}")
        for place, (one, other) in enumerate(zip(got, expected)):
            require_same(one, other, f"{what}, array {place}")
    elif expected is None:
        require(got is None, f"{what}: got {type(got).__name__}, and must get nothing")
    else:
        require(got.dtype == expected.dtype, f"{what}: got {got.dtype}, and must get {expected.dtype}")
        require(got.shape == expected.shape, f"{what}: got shape {list(got.shape)}, and must get {list(expected.shape)}")
        wrong = np.argwhere(got != expected)
        require(len(wrong) == 0 and got.tobytes() == expected.tobytes(),
                f"{what}: element {[int(i) for i in wrong[0]] if len(wrong) else '(a sign of zero)'} of the result is wrong, "
                f"and {len(wrong)} of {got.size} are")


def by_group(results: list, situation: CommSituation):
    """(ranks of a group, their results in its order), for every group of the situation's axis."""
    for ranks in groups(situation.layout, *situation.axes):
        yield ranks, [results[rank] for rank in ranks]


def _axis(wire, situation):
    return Mesh(situation.layout, wire, situation.node).axis(*situation.axes)


# The mesh.

def mesh_is_a_grid(world, layout: Layout):
    """Groups cut the ranks into lines of the grid, numbered in the layout's order, and messages find the neighbours on each."""
    strides = {axis: math.prod(getattr(layout, inner) for inner in layout.order[place + 1:])
               for place, axis in enumerate(layout.order)}
    for rank in range(layout.ranks):
        where = coordinates(layout, rank)
        require(sum(index * strides[axis] for axis, index in where.items()) == rank,
                f"rank {rank} of {layout} stands at {where}, where the order {','.join(layout.order)} has another rank")
        require(rank_at(layout, where) == rank, f"the rank at {where} of {layout} is {rank}, not {rank_at(layout, where)}")
    results = world.run(_greet_neighbours, layout.ranks, layout)
    for axes in _all_axes(layout):
        drawn = groups(layout, *axes)
        require(sorted(rank for group in drawn for rank in group) == list(range(layout.ranks)),
                f"the groups of {'+'.join(axes)} on {layout} do not hold each rank once: {drawn}")
        for group in drawn:
            _check_group(layout, axes, group, results)


def _check_group(layout, axes, group, results):
    size = math.prod(getattr(layout, axis) for axis in axes)
    name = f"{'+'.join(axes)} on {layout}"
    require(len(group) == size and group == sorted(group), f"a group of {name} is {group}, and must be {size} ranks in order")
    for index, rank in enumerate(group):
        ranks, mine, before = results[rank][axes]
        require(list(ranks) == group and mine == index,
                f"rank {rank} takes {list(ranks)} for its group on {name} and {mine} for its index; they are {group} and {index}")
        theirs = coordinates(layout, group[index - 1])
        require(dict(zip(AXES, before.tolist())) == theirs,
                f"on {name} rank {rank} heard from {before.tolist()} (dp, pp, cp, tp), and its neighbour stands at {theirs}")
        differs = [axis for axis in AXES if theirs[axis] != coordinates(layout, rank)[axis]]
        require(set(differs) <= set(axes), f"on {name} rank {rank} has a neighbour that differs in {', '.join(differs)}")


def _greet_neighbours(wire, layout):
    """Tell the next rank on each axis where I stand: axes -> (ranks, index, what the one before told me)."""
    mesh, heard = Mesh(layout, wire), {}
    for axes in _all_axes(layout):
        axis, told = mesh.axis(*axes), np.full(len(AXES), -1)
        coming = axis.irecv(told, (axis.index - 1) % axis.size)
        axis.send(np.array([mesh.coordinates()[name] for name in AXES]), (axis.index + 1) % axis.size)
        coming.wait()
        heard[axes] = axis.ranks, axis.index, told
    return heard


def _all_axes(layout):
    return [axes for count in range(len(AXES) + 1) for axes in combinations(layout.order, count)]


# Collectives.

def run_cases(wire, situation):
    """Every case on the situation's axis: name -> (what came out, what the ledger counted on the axis, messages of all kinds)."""
    axis, found = _axis(wire, situation), {}
    for number, (name, case) in enumerate(cases_of(situation).items()):
        x = case.given(situation, axis.index, axis.ranks[0], number)
        before = [array.copy() for array in watch.arrays_of([x])]
        with watch.watching(watch.Ledger()) as ledger:
            y = case.run(x, axis, situation)
        for array, was in zip(watch.arrays_of([x]), before):
            require_same(array, was, f"the argument of {name} after the call")
        found[name] = y, ledger_volume(ledger, axis.name, case.operation), sum(ledger.messages.values())
    return found


def collective_means(world, situation: CommSituation):
    """Each collective gives what its single-process meaning gives, to the bit, and leaves its argument alone."""
    for ranks, found in by_group(world.run(run_cases, situation.ranks, situation), situation):
        for number, (name, case) in enumerate(cases_of(situation).items()):
            xs = [case.given(situation, index, ranks[0], number) for index in range(len(ranks))]
            for rank, got, expected in zip(ranks, found, case.meaning(xs, situation), strict=True):
                require_same(got[name][0], expected, f"{name} on rank {rank} in {situation}")


def collective_counts(world, situation: CommSituation):
    """Messages and bytes of each rank, sent and received, are what the formulas say; those of rings are the lower bound."""
    for ranks, found in by_group(world.run(run_cases, situation.ranks, situation), situation):
        for name, case in cases_of(situation).items():
            for index, rank in enumerate(ranks):
                promised = case.volume(index, situation, ranks)
                _, counted, of_all_kinds = found[index][name]
                require(counted == promised,
                        f"{name} on rank {rank}: the ledger has {counted}, the formulas {promised}, in {situation}")
                booked = promised.messages + promised.messages_received
                require(of_all_kinds == booked,
                        f"{name} on rank {rank}: {of_all_kinds} messages, of which {booked} are booked under its name")
            _require_least(name, case.operation, [one[name][1] for one in found], situation)


def _require_least(name: str, operation: str, counted: list, situation):
    """Where an algorithm sends as little as can be sent, all its ranks together do."""
    algorithm = name.removeprefix(operation).strip()
    if optimal(operation, algorithm, situation.size):
        dtype = travels(operation, algorithm, situation.dtype)
        parts = [math.prod(situation.shard_shape(situation.dim, index)) for index in range(situation.size)]
        total, least = sum(one.elements for one in counted), volume.lower_bound(operation, parts) * dtype.itemsize
        require(total == least, f"{name}: all ranks together send {total} bytes, and the lower bound is {least}, in {situation}")


def bitwise_repeatable(world, situation: CommSituation):
    """With numbers that round, all ranks get the same bits, and a second run gets the same again.  Halving and doubling add in one
    order, so what they give is the same too."""
    first, second = (world.run(_sum_fractions, situation.ranks, situation) for _ in range(2))
    for rank, (one, other) in enumerate(zip(first, second)):
        for name in one:
            require_same(other[name], one[name], f"{name} on rank {rank}, a second time")
    for ranks, found in by_group(first, situation):
        for rank, one in zip(ranks, found):
            for name in cases_of(situation, "all_reduce"):
                require_same(one[name], found[0][name], f"{name} on rank {rank}, beside rank {ranks[0]}, in {situation}")
            if {"all_reduce rabenseifner", "all_reduce doubling"} <= one.keys():
                require_same(one["all_reduce rabenseifner"], one["all_reduce doubling"], f"two ways of halving, on rank {rank}")


def _sum_fractions(wire, situation):
    """Every algorithm that adds up, on numbers that round."""
    axis = _axis(wire, situation)
    x = situation.fractions(situation.shape, axis.ranks[0], axis.index)
    return {name: case.run(x, axis, situation) for name, case in sums_of(situation).items()}


def one_rounding(world, situation: CommSituation):
    """A sum of float16 over ranks is the exact sum, rounded once, however many ranks there are, by every algorithm."""
    situation = replace(situation, dtype="float16", op="add")
    results = world.run(_sum_fractions, situation.ranks, situation)
    for ranks, found in by_group(results, situation):
        xs = np.array([situation.fractions(situation.shape, ranks[0], index) for index in range(situation.size)], np.float64)
        exact = xs.sum(axis=0).astype(np.float16)                           # float64 holds any such sum of 2**13 exactly
        for name, case in sums_of(situation).items():
            for rank, got, expected in zip(ranks, found, case.meaning([exact], situation), strict=True):
                require_same(got[name], expected, f"{name} of float16 on rank {rank} in {situation}")


# Conjugate pairs.

def conjugate(world, situation: CommSituation):
    """<dy, A x> = <A' dy, x>, exactly, for every pair; and what comes out lies as the pair says, with the value unchanged."""
    results = world.run(_run_pairs, situation.ranks, situation)
    for name in PAIRS:
        for ranks, found in by_group([one[name] for one in results], situation):
            about = f"{name} in {situation}"
            (_, _, _, _, takes, gives), (xs, ys, dys, dxs, _, _) = found[0], zip(*found)
            left, right = inner(dys, ys, gives), inner(dxs, xs, takes)
            require(left == right, f"<dy, A x> is {left} and <A' dy, x> is {right}, and they must be equal: {about}")
            _require_placed(xs, ys, takes, gives, name != "shift", f"the value of {about}")
            _require_placed(dys, dxs, dual(gives), dual(takes), name != "shift", f"the gradient of {about}")


def _require_placed(inputs, outputs, was, now, unchanged, what):
    """Where all ranks hold the whole, they hold the same bits; a change of placement leaves the value as it is."""
    if now.kind in ("Replicate", "Invariant"):
        for index, output in enumerate(outputs):
            require_same(output, outputs[0], f"index {index} beside index 0, {now} both: {what}")
    if unchanged:
        require_same(whole(list(outputs), now), whole(list(inputs), was), f"{was} -> {now}: {what}")


def _run_pairs(wire, situation):
    """Every pair, forward and backward on drawn values: name -> (x, y, dy, dx, takes, gives)."""
    axis, found = _axis(wire, situation), {}
    for name, build in PAIRS.items():
        here = situation.even() if name == "shift" else situation
        pair = build(axis, here)
        x = here.held(pair.takes, axis.ranks[0], axis.index, 0)
        dy = here.held(dual(pair.gives), axis.ranks[0], axis.index, 1)
        found[name] = x, pair.forward(x), dy, pair.backward(dy), pair.takes, pair.gives
    return found


def composition(world, situation: CommSituation):
    """A change of placement and its inverse are no change, in value and in gradient; two that lead elsewhere are the one that does.

    And all_reduce is the all_gather of the reduce_scatter, to the bit, with numbers that round.
    """
    for rank, found in enumerate(world.run(_run_compositions, situation.ranks, situation)):
        for name, (got, expected) in found.items():
            require_same(got, expected, f"{name} on rank {rank} in {situation}")


def _run_compositions(wire, situation):
    """name -> (what two steps gave, what it must be)."""
    axis, found = _axis(wire, situation), {}
    for (first, second), other in COMPOSITIONS.items():
        one, two = PAIRS[first](axis, situation), PAIRS[second](axis, situation)
        x = situation.held(one.takes, axis.ranks[0], axis.index, 0)
        dy = situation.held(dual(two.gives), axis.ranks[0], axis.index, 1)
        direct = PAIRS[other](axis, situation) if other else Pair(keep, keep, one.takes, two.gives)
        found[f"{second} after {first}"] = two.forward(one.forward(x)), direct.forward(x)
        found[f"the gradient of {second} after {first}"] = one.backward(two.backward(dy)), direct.backward(dy)
    x = situation.fractions(situation.shape, axis.ranks[0], axis.index)
    flat, sizes = x.reshape(x.size), shares(x.size, axis.size)
    for scatter, gather, both in (("ring", "ring", "ring"), ("direct", "ring", "direct"), ("halving", "doubling", "rabenseifner")):
        part = collectives.reduce_scatter(flat, axis, 0, sizes, algorithm=ALGORITHMS["reduce_scatter"][scatter])
        halves = collectives.all_gather(part, axis, 0, sizes, algorithm=ALGORITHMS["all_gather"][gather])
        whole_sum = collectives.all_reduce(x, axis, algorithm=ALGORITHMS["all_reduce"][both])
        found[f"{gather} all_gather of {scatter} reduce_scatter"] = halves.reshape(x.shape), whole_sum
    return found


# The wire.

def _pieces(wire, nbytes: int) -> list:
    """The program of one rank: how the wire would cut a message."""
    return pieces(nbytes)


def pieces_cover(world, nbytes: int):
    """A message of any length is sent in pieces that MPI can count: one after another, none too long, nothing left out."""
    cut, end = world.run(_pieces, 1, nbytes)[0], 0
    for start, stop in cut:
        require(start == end, f"a message of {nbytes} bytes: a piece starts at {start}, and the one before ends at {end}")
        require(0 <= stop - start < 2**31,
                f"a message of {nbytes} bytes: a piece has {stop - start}, and MPI counts to {2**31 - 1}")
        end = stop
    require(end == nbytes, f"a message of {nbytes} bytes: its pieces end at {end}")
    require(len(cut) == max(-(-nbytes // (2**31 - 1)), 1), f"a message of {nbytes} bytes: it is cut into {len(cut)} pieces")
