"""The two trees of pipelines, for any number of ranks."""
import pytest

from refpar.algorithms.pipelined import chain, children, segments, two_trees


@pytest.mark.parametrize("p", range(1, 40))
def test_two_trees_reach_all_and_no_rank_works_in_both(p):
    trees = two_trees(p)
    for parents in trees:
        assert len(parents) == p and parents[0] is None
        for place in range(1, p):
            steps = 0
            while place:
                place, steps = parents[place], steps + 1
            assert steps <= p.bit_length()
        assert all(len(children(parents, place)) <= (2 if place else 1) for place in range(p))
    assert not [place for place in range(1, p) if children(trees[0], place) and children(trees[1], place)]


def test_a_chain():
    assert chain(4) == [[None, 0, 1, 2]] and chain(1) == [[None]]


@pytest.mark.parametrize("count, trees, length", [(0, 2, 3), (1, 2, 3), (10, 1, 3), (11, 2, 1), (12, 2, 100)])
def test_segments_cover_each_tree_once(count, trees, length):
    pieces = segments(count, trees, length)
    assert sorted(place for _, piece in pieces for place in range(piece.start, piece.stop)) == list(range(count))
    assert {tree for tree, _ in pieces} == set(range(trees)) and all(piece.stop - piece.start <= length for _, piece in pieces)
