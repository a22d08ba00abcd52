"""The mesh is a grid, in the survey's order or another; its groups are the survey's in corrected form."""
import pytest
from drawn import check, first
from strategies_comm import EXAMPLES, MOST, layouts

from refpar.comm.mesh import Mesh, coordinates, groups, nodes, rank_at
from refpar.comm.threads import ThreadWorld
from refpar.config import Layout
from refpar.oracle import properties_comm


def test_is_a_grid(world):
    check(world, properties_comm.mesh_is_a_grid, layouts(world.size or MOST), EXAMPLES)


def test_figure_4_of_the_survey():
    """Eight ranks, dp=2, pp=2, tp=2.  (The survey prints, for dp, the members of a replica: [0, 1, 2, 3].)"""
    layout = Layout(dp=2, pp=2, tp=2)
    assert groups(layout, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(layout, "pp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(layout, "dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_figure_5_of_the_survey():
    """Sixteen ranks, 2 on each axis.  (The survey prints, for pp, the members of a stage: [0, 1, 2, 3].)"""
    layout = Layout(dp=2, pp=2, cp=2, tp=2)
    assert groups(layout, "tp")[:2] == [[0, 1], [2, 3]]
    assert groups(layout, "cp")[:2] == [[0, 2], [1, 3]]
    assert groups(layout, "pp")[:2] == [[0, 4], [1, 5]]
    assert groups(layout, "dp")[:2] == [[0, 8], [1, 9]]


def test_several_axes_as_one():
    layout = Layout(dp=2, pp=2, cp=3)
    assert groups(layout, "dp", "cp") == groups(layout, "cp", "dp") == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert groups(layout) == [[rank] for rank in range(12)]


def test_another_order():
    layout = Layout(dp=3, tp=2, order=("tp", "cp", "pp", "dp"))
    assert groups(layout, "dp") == [[0, 1, 2], [3, 4, 5]]
    assert coordinates(layout, 4) == {"tp": 1, "cp": 0, "pp": 0, "dp": 1}
    assert rank_at(layout, {"dp": 1, "pp": 0, "cp": 0, "tp": 1}) == 4


def program(wire, layout):
    mesh = Mesh(layout, wire)
    axis = mesh.axis("dp", "cp")
    return axis.name, axis.ranks, axis.index, mesh.rank({"tp": 0}), mesh.coordinates()


def test_as_a_rank_sees_it():
    layout = Layout(dp=2, cp=2, tp=2)
    results = ThreadWorld().run(program, 8, layout)
    assert results[5] == ("dp+cp", (1, 3, 5, 7), 2, 4, {"dp": 1, "pp": 0, "cp": 0, "tp": 1})


@pytest.mark.parametrize("axes, sentence", [
    (("ep",), "'ep' is no axis; the axes are dp, pp, cp, tp"), (("dp", "dp"), "dp stands twice")])
def test_axes_that_do_not_exist(axes, sentence):
    with pytest.raises(ValueError, match=sentence):
        groups(Layout(dp=2), *axes)


def test_a_layout_of_another_size():
    with pytest.raises(ValueError, match="^mesh: dp=2,tp=3 needs 6 ranks, and this world has 4"):
        ThreadWorld().run(program_of_a_mesh, 4, Layout(dp=2, tp=3))


def program_of_a_mesh(wire, layout):
    return Mesh(layout, wire)


@pytest.mark.parametrize("corner", [
    lambda layout: sorted((layout.dp, layout.pp, layout.cp, layout.tp)) == [1, 1, 2, 3],
    lambda layout: layout.dp > 1 < layout.cp and layout.pp > 1,
    lambda layout: layout.order[0] == "tp" and layout.tp == 2 and layout.dp == 3,
    lambda layout: layout.ranks == 7])
def test_the_strategy_reaches(corner):
    assert first(layouts(), corner) is not None


@pytest.mark.parametrize("ranks, node, found", [
    ((0, 1, 2, 3), None, [[0, 1, 2, 3]]), ((0, 1, 2, 3, 4), 2, [[0, 1], [2, 3], [4]]), ((1, 3, 5, 7), 4, [[0, 1], [2, 3]]),
    ((2, 3, 4), 3, [[0], [1, 2]]), ((0, 4), 4, [[0], [1]])])
def test_nodes(ranks, node, found):
    """A node is so many ranks of the world in a row; those of a group are named by their index in it."""
    assert nodes(ranks, node) == found
