"""Conjugate pairs: each the transpose of its partner, each true to its placements."""
import numpy as np
import pytest
from drawn import check
from strategies_comm import EXAMPLES, MOST, situations

from refpar.algorithms import along
from refpar.comm import pairs
from refpar.comm.mesh import Axis
from refpar.comm.placement import GRADIENT, Invariant, Partial, Replicate, Shard, dual
from refpar.oracle.placed import inner, whole
from refpar.comm.threads import ThreadWorld
from refpar.oracle import properties_comm


def test_conjugate(world):
    check(world, properties_comm.conjugate, situations(world.size or MOST), EXAMPLES)


def test_composition(world):
    check(world, properties_comm.composition, situations(world.size or MOST), EXAMPLES)


def test_the_gradient_table_is_its_own_inverse():
    for kind, other in GRADIENT.items():
        assert GRADIENT[other] == kind
    assert dual(Shard(1)) == Shard(1) and dual(Partial) == Replicate and dual(Replicate) == Partial and dual(Invariant) == Invariant
    assert repr([Shard(1), Partial]) == "[Shard(1), Partial]"


def test_what_placements_mean():
    one, two = np.array([[1, 2]]), np.array([[3, 4]])
    assert whole([one, two], Shard(0)).tolist() == [[1, 2], [3, 4]] and whole([one, two], Shard(1)).tolist() == [[1, 2, 3, 4]]
    assert whole([one, two], Partial).tolist() == [[4, 6]]
    assert whole([two, two], Invariant) is two
    assert inner([one, one], [two, two], Invariant) == 11 and inner([one, two], [two, two], Replicate) == 11 + 25


def program_every_rank_for_itself(wire):
    """y = x on every rank of its own use: loss (w**2 + 1) d summed over ranks, at w = 1, with d = rank."""
    axis = Axis.world(wire)
    w, d = np.array([1.0]), wire.rank
    use = pairs.copy_to(axis)
    one = use.forward(w)
    return use.backward(2 * one * d), pairs.reduce_from(axis).backward(np.array([1.0])), pairs.over(axis).backward(np.array([1.0]))


def test_the_gradient_of_a_replicated_weight():
    """jax-ml/jax#3970: with d = 0 and 1 the gradient is 2 on each rank, and not [0, 4]."""
    for gradient, of_the_sum, of_each_ones_sum in ThreadWorld().run(program_every_rank_for_itself, 2):
        assert gradient == 2 and of_the_sum == 1 and of_each_ones_sum == 2


def program_slices(wire):
    whole_array = np.arange(8.0)
    return pairs.my_slice(whole_array, Axis.world(wire), 0), along.shift(Axis.world(wire)).forward(whole_array)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_slice_does_not_keep_the_whole(ranks):
    for part, shifted in ThreadWorld().run(program_slices, ranks):
        assert part.base is None and shifted.base is None
