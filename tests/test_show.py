"""What `show` draws: the survey's figures 4 and 5, shards that add up, messages that the formulas count."""
import json

import pytest

from refpar import cli
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import PRESETS, Layout
from refpar.nn.build import build
from refpar.parallel.placement import cut
from refpar.show import mesh, messages, shards


def shown(capsys, *words):
    assert cli.main(["show", *words]) == 0
    return capsys.readouterr().out


FIGURE_4 = """\
mesh dp=2,pp=2,tp=2: 8 ranks, dp outermost, tp innermost

                 tp=0   tp=1
  dp=0  pp=0        0      1
        pp=1        2      3
  dp=1  pp=0        4      5
        pp=1        6      7

groups: the ranks that differ in that coordinate alone, and so talk to each other on that axis
  dp  [[0,4],[1,5],[2,6],[3,7]]
  pp  [[0,2],[1,3],[4,6],[5,7]]
  cp  [[0],[1],[2],[3],[4],[5],[6],[7]]
  tp  [[0,1],[2,3],[4,5],[6,7]]

the survey's figure 4 prints
  TP: [[0,1],[2,3],[4,5],[6,7]]
  PP: [[0,2],[1,3],[4,6],[5,7]]
  DP: [[0,1,2,3],[4,5,6,7]]
      corrected: these are the members of each replica; dp communicates in
      [[0,4],[1,5],[2,6],[3,7]]
"""

FIGURE_5 = """\
mesh dp=2,pp=2,cp=2,tp=2: 16 ranks, dp outermost, tp innermost

                        tp=0    tp=1
  dp=0  pp=0  cp=0         0       1
              cp=1         2       3
        pp=1  cp=0         4       5
              cp=1         6       7
  dp=1  pp=0  cp=0         8       9
              cp=1        10      11
        pp=1  cp=0        12      13
              cp=1        14      15

groups: the ranks that differ in that coordinate alone, and so talk to each other on that axis
  dp  [[0,8],[1,9],[2,10],[3,11],[4,12],[5,13],[6,14],[7,15]]
  pp  [[0,4],[1,5],[2,6],[3,7],[8,12],[9,13],[10,14],[11,15]]
  cp  [[0,2],[1,3],[4,6],[5,7],[8,10],[9,11],[12,14],[13,15]]
  tp  [[0,1],[2,3],[4,5],[6,7],[8,9],[10,11],[12,13],[14,15]]

the survey's figure 5 prints
  TP: [[0,1],[2,3],[4,5],[6,7],[8,9],[10,11],[12,13],[14,15]]
  CP: [[0,2],[1,3],[4,6],[5,7],[8,10],[9,11],[12,14],[13,15]]
  PP: [[0,1,2,3],[4,5,6,7],[8,9,10,11],[12,13,14,15]]
      corrected: these are the members of each stage; pp communicates in
      [[0,4],[1,5],[2,6],[3,7],[8,12],[9,13],[10,14],[11,15]]
"""


def test_the_surveys_figures(capsys):
    assert shown(capsys, "mesh", "--mesh", "dp=2,pp=2,tp=2") == FIGURE_4
    assert shown(capsys, "mesh", "--mesh", "dp=2,pp=2,cp=2,tp=2") == FIGURE_5


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=6), Layout(dp=3, tp=5), Layout(dp=4, tp=8, order=("tp", "cp", "pp", "dp")),
                                    Layout(tp=40, pp=2)], ids=str)
def test_a_map_is_at_most_100_columns_wide_and_has_every_rank(layout):
    assert all(len(line) <= 100 for line in mesh.draw(layout).splitlines() if not line.startswith(("  tp  ", "      ")))
    told = mesh.describe(layout)
    for groups in told["groups"].values():
        assert sorted(rank for group in groups for rank in group) == list(range(layout.ranks))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, tp=2), Layout(pp=3, tp=2), Layout(cp=2)], ids=str)
def test_shards_are_what_the_ranks_cut(name, layout):
    """The totals are the elements of the slices that `parallel.placement.cut` gives, and a stage's shares add up to its layers."""
    model = PRESETS[name]
    dims = build(model).dims()

    def program(wire):
        here = Mesh(layout, wire)
        slices = [cut(model, text, here) for group in dims.values() for text in group.values()]
        count = sum(_size(part) for part in slices)
        return here.coordinates()["tp"], count
    held = shards.totals(model, layout)
    for tp, count in ThreadWorld().run(program, layout.ranks):
        assert count == sum(held[stage, tp] for stage in range(layout.pp))
    drawn = shards.draw(model, layout, name)
    assert max(map(len, drawn.splitlines())) <= 100


def _size(part):
    size = 1
    for piece in part:
        size *= piece.stop - piece.start
    return size


def test_shards_of_a_llama(capsys):
    out = shown(capsys, "shards", "--model", "llama-tiny", "--mesh", "dp=2,tp=2")
    assert "  q           D HE/tp       [64, 64]        [64, 32]          Shard(1)   Replicate  dp, cp\n" in out
    assert "  norm        D             [64]            [64]              Invariant  Replicate  dp, cp\n" in out
    told = json.loads(shown(capsys, "shards", "--model", "llama-tiny", "--mesh", "dp=2,tp=2", "--json"))
    assert [kind["kind"] for kind in told["kinds"]] == ["embedding", "attention", "mlp", "norm", "head"]
    assert told["totals"][0]["elements"] == told["totals"][1]["elements"]


ALGORITHMS = [(name, algorithm) for name in messages.CALLS for algorithm in (None, *messages.ALGORITHMS.get(name, ()))]


@pytest.mark.parametrize("name, algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout, size", [
    (Layout(), 3), (Layout(dp=4), 8), (Layout(dp=3), 2), (Layout(dp=2, tp=3), 7), (Layout(cp=5), 0)])
def test_messages_are_what_the_formulas_count(name, algorithm, layout, size):
    told = messages.describe(layout, name, size, messages.How(algorithm, node=2))
    assert all(row["messages"] == row["formula_messages"] and row["bytes"] == row["formula_bytes"] for row in told["totals"])
    assert max(map(len, messages.draw(told).splitlines())) <= 100


def test_the_rounds_of_a_ring(capsys):
    told = json.loads(shown(capsys, "messages", "all_reduce", "--mesh", "dp=3", "--size", "3", "--algorithm", "ring", "--json"))
    assert [(sent["round"], sent["source"], sent["to"], sent["what"]) for sent in told["messages"]] == [
        (1, 0, 1, "x[2:3] of 0"), (1, 1, 2, "x[0:1] of 1"), (1, 2, 0, "x[1:2] of 2"),
        (2, 0, 1, "x[1:2] of 0+2"), (2, 1, 2, "x[2:3] of 0+1"), (2, 2, 0, "x[0:1] of 1+2"),
        (3, 0, 1, "x[0:1] of 0+1+2"), (3, 1, 2, "x[1:2] of 0+1+2"), (3, 2, 0, "x[2:3] of 0+1+2"),
        (4, 0, 1, "x[2:3] of 0+1+2"), (4, 1, 2, "x[0:1] of 0+1+2"), (4, 2, 0, "x[1:2] of 0+1+2")]


def test_a_tree_doubles_those_who_know(capsys):
    told = json.loads(shown(capsys, "messages", "broadcast", "--mesh", "dp=8", "--size", "1", "--json"))
    assert sorted((sent["source"], sent["to"]) for sent in told["messages"]) == [
        (0, 1), (0, 2), (0, 4), (2, 3), (4, 5), (4, 6), (6, 7)]
    assert "round 1" in shown(capsys, "messages", "broadcast", "--mesh", "dp=8")
