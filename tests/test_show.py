"""What `show` draws: the survey's figures 4 and 5, shards that add up, messages that the formulas count."""
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar import cli
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import CP_ATTENTION, PRESETS, SCHEDULES, Layout
from refpar.nn.build import build
from refpar.parallel.placement import cut
from refpar.show import layers, mesh, messages, shards, tokens


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
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, tp=2), Layout(pp=3, tp=2), Layout(cp=2), Layout(tp=5, sp=True)], ids=str)
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


def test_shards_of_a_run(capsys):
    """Two key heads on three ranks: the last two share one, four query heads of eight between them.  With sp, norms are summed over tp."""
    out = shown(capsys, "shards", "--model", "llama-tiny", "--mesh", "tp=3", "--sp")
    assert "  q           D HE/tp       [64, 64]        [64, 16/32]       Shard(1)   Replicate  dp, cp\n" in out
    assert "  k           D KE/tp       [64, 16]        [64, 8]           Shard(1)   Replicate  dp, cp, tp run\n" in out
    assert "  norm        D             [64]            [64]              Replicate  Replicate  dp, cp, tp\n" in out


ZIGZAG = """\
one row of 64 tokens between the layers, cut over cp and tp, in the order of zigzag
  cp=0 tp=0   ################................................................   16
  cp=0 tp=1   ................................................################   16
  cp=1 tp=0   ................################................................   16
  cp=1 tp=1   ................................################................   16
"""


def test_the_tokens_of_each_rank(capsys):
    assert ZIGZAG in shown(capsys, "shards", "--mesh", "cp=2,tp=2", "--sp", "--cp", "zigzag")
    assert "  cp=1        .#.#.#" in shown(capsys, "shards", "--mesh", "cp=2", "--cp", "striped")
    out = shown(capsys, "shards", "--model", "mamba2", "--mesh", "cp=2", "--cp", "striped")
    assert "in the order of contiguous\n" in out and f"  cp=1        {'.' * 32}{'#' * 32}" in out
    assert "tokens" not in shown(capsys, "shards", "--mesh", "tp=2")


@settings(max_examples=40)
@given(st.sampled_from(CP_ATTENTION), st.integers(1, 9), st.integers(1, 9))
def test_every_token_is_drawn_once(way, cp, tp):
    told = tokens.describe(PRESETS["llama"], Layout(cp=cp, tp=tp, sp=True, cp_attention=way))
    assert sorted(column for rank in told["ranks"] for column in rank["columns"]) == list(range(64))


# Layer -> (forward, backward): the collectives that each way calls, without sp and with it.
SENDS = {
    "embedding": ((["all_reduce"], []), (["reduce_scatter"], ["all_gather"])),
    "mlp": ((["all_reduce"], ["all_reduce"]), (["all_gather", "reduce_scatter"], ["all_gather", "reduce_scatter"])),
    "head": (([], ["all_reduce"]), (["all_gather"], ["reduce_scatter"])),
    "loss": ((["all_reduce"], []), (["all_reduce"], [])),
}


@pytest.mark.parametrize("layer", SENDS)
@pytest.mark.parametrize("sp", [False, True])
def test_what_a_layer_sends(layer, sp):
    told = layers.describe(PRESETS["llama-tiny"], Layout(dp=2, tp=2, sp=sp), layer)
    found = [[row["collective"] for row in told["sent"] if row["way"] == way] for way in ("forward", "backward")]
    assert found == list(SENDS[layer][sp]) and {row["axis"] for row in told["sent"]} == {"tp"}


def test_bytes_of_a_layer(capsys):
    """Two ranks: an all_reduce of x is 2 (p-1)/p of its bytes, an all_gather or reduce_scatter half of that; Mamba-1 sums twice."""
    whole = 2 * 64 * 64 * 4
    plain, cut = (layers.describe(PRESETS["llama-tiny"], Layout(tp=2, sp=sp), "attention")["sent"] for sp in (False, True))
    assert [row["bytes"] for row in plain] == [[whole, whole]] * 2 and [row["bytes"] for row in cut] == [[whole // 2, whole // 2]] * 4
    sums = [row["calls"] for row in layers.describe(PRESETS["mamba1-tiny"], Layout(tp=2), "mamba1")["sent"]]
    assert sums == [2, 2]
    assert "forward: nothing is sent" in shown(capsys, "messages", "mlp", "--mesh", "dp=2")
    out = shown(capsys, "messages", "attention", "--sp")
    assert "attention on mesh tp=2, sp" in out and max(map(len, out.splitlines())) <= 100
    assert "  forward   tp    all_gather               1           1            16,384\n" in out


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


def volumes_of(capsys, *words):
    told = json.loads(shown(capsys, "volumes", *words, "--json"))
    return told, {(row["layer"], row["strategy"]): [size["forward"] for size in row["bytes"]] for row in told["rows"]}


def test_volumes_do_not_grow_for_a_state(capsys):
    told, sent = volumes_of(capsys, "--mesh", "tp=4", "--sequence", "20000")
    assert told["lengths"] == [1024, 4096, 16384, 20000] and told["dtype"] == "float32"
    assert len(set(sent["mamba2", "CP, gather"])) == len(set(sent["mamba2", "CP, scan"])) == 1
    assert sent["attention", "TP"] == sent["attention", "TPSP"] == [4 * 2 * 3 / 4 * tokens * 128 for tokens in told["lengths"]]
    for row in ("CP, ring", "CP, gather", "TPUP (Ulysses)"):
        assert sent["attention", row] == sorted(set(sent["attention", row]))
    assert all(row["differs"] or not row["table"] or row["printed"] == "0" for row in told["rows"])


HYBRID = "llama-tiny,pattern=attention+mamba2,groups=8,kv_heads=8"


def test_volumes_are_the_figures_where_sizes_are_even_and_sums_long(capsys):
    """In full, and with no star; where ranks have no head, or a sum is short, with one."""
    told, _ = volumes_of(capsys, "--mesh", "cp=8", "--model", HYBRID)
    for row in told["rows"]:
        assert [size["forward"] for size in row["bytes"]] == pytest.approx(row["figure"], rel=1e-12), row
    assert "*" not in shown(capsys, "volumes", "--mesh", "cp=8", "--model", HYBRID)
    assert "* not what the formula says" in shown(capsys, "volumes", "--mesh", "tp=8", "--model", "llama-tiny,width=16,heads=2")


def test_volumes_of_the_mesh_that_is_named(capsys):
    """One axis is a row of the survey's; more than one, or another way, is a row more.  A hybrid's Mamba is led to another order."""
    told, sent = volumes_of(capsys, "--mesh", "cp=2,tp=2", "--sp", "--model", "llama-tiny", "--sequence", "1024")
    stream, keys = 4 * 2 / 2 * 512 * 64, 4 * 512 * 2 * 8
    assert sent["attention", "cp=2,tp=2, sp"] == [stream + keys]
    assert len(told["rows"]) == len(volumes_of(capsys, "--mesh", "cp=4")[0]["rows"]) + 2
    _, sent = volumes_of(capsys, "--mesh", "cp=4", "--cp", "zigzag", "--model", HYBRID, "--sequence", "1024")
    alone = sent["mamba2", "CP, gather"][0]
    assert sent["mamba2", "cp=4"][0] == alone + 4 * 2 * 64 * 1024 / 4 * (3 / 4)


def test_where_attention_and_a_state_send_as_much(capsys):
    told, sent = volumes_of(capsys, "--mesh", "cp=8", "--model", HYBRID)
    per_token = sent["attention", "CP, ring"][0] / 1024
    assert told["even"] == pytest.approx(sent["mamba2", "CP, gather"][0] / per_token)
    assert volumes_of(capsys, "--mesh", "dp=1")[0]["even"] is None
    assert "Attention around a ring" not in shown(capsys, "volumes", "--mesh", "dp=1")


@pytest.mark.parametrize("name", PRESETS)
def test_volumes_are_at_most_100_columns_wide(capsys, name):
    out = shown(capsys, "volumes", "--model", name, "--mesh", "tp=3", "--sequence", "1048576")
    assert max(map(len, out.splitlines())) <= 100 and "1024K" in out


def test_work_beside_the_surveys(capsys):
    """Per rank; keys and values twice where 4 ranks share 2 key heads, and of a causal row a little more than half."""
    told = json.loads(shown(capsys, "work", "--mesh", "tp=4", "--sequence", "1000", "--json"))
    terms = {(one["layer"], one["term"]): one for one in told["terms"]}
    keys = 4 * 1000 * 2 * 32 * 128
    assert terms["attention", "K, V"]["figure"] == keys
    assert terms["attention", "K, V"]["ours"] == {"dp": keys, "tp": 2 * keys, "cp": keys}
    pairs = terms["attention", "Q K', S V"]
    assert pairs["backward"] == 2.5 and all(0.5 < ours / pairs["figure"] < 0.6 for ours in pairs["ours"].values())
    assert pairs["ours"]["cp"] < pairs["ours"]["dp"]                        # shorter rows have shorter blocks, which hide less
    out = shown(capsys, "work", "--model", "mamba2-uneven")
    assert "- elementwise, no matrix product" in out and max(map(len, out.splitlines())) <= 100


def test_a_schedule_is_drawn_with_its_bubble(capsys):
    assert cli.main(["show", "schedule", "--mesh", "pp=4", "--micro-batches", "6", "--schedule", "gpipe"]) == 0
    out = capsys.readouterr().out
    assert "gpipe: 4 ranks, 4 stages, 6 micro-batches" in out and "3F0" in out and "bubble" in out


def test_a_picture_needs_its_extra_or_is_written(tmp_path, capsys):
    status = cli.main(["show", "schedule", "--schedule", "dualpipe", "--plot", str(tmp_path / "x.svg")])
    if status == 0:
        assert "<svg" in (tmp_path / "x.svg").read_text()
    else:
        assert status == 2 and "--plot needs matplotlib" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert cli.main(["show", "schedule", "--plot", str(tmp_path / "x.doc")]) == 2
    assert "--plot" in capsys.readouterr().err and not list(tmp_path.glob("x.doc"))


def test_a_schedule_s_trace_is_of_the_real_program(tmp_path, capsys):
    """Its last event ends with the makespan that is drawn, a second a unit."""
    path = tmp_path / "trace.json"
    assert cli.main(["show", "schedule", "--mesh", "pp=3", "--micro-batches", "4", "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    ends = max(event["ts"] + event.get("dur", 0) for event in events)
    assert f"makespan {ends / 1e6:g}:" in capsys.readouterr().out
    assert {event[key] for event in events for key in ("pid", "tid")} >= {0, 1, 2}


def test_a_schedule_s_bubble_stands_beside_its_formula(capsys):
    """With times of its own, exactly; and where messages take time no formula is claimed."""
    out = shown(capsys, "schedule", "--mesh", "pp=4", "--micro-batches", "6", "--schedule", "zb-h1", "--costs", "0.3,0.4,0.2")
    assert "makespan 6.9: work 5.4, bubble 1.5 (21.74 % of the longest span); by the formula 1.5" in out
    interleaved = ("schedule", "--mesh", "pp=2", "--micro-batches", "4", "--schedule", "interleaved", "--virtual-stages", "3")
    assert "bubble 9 (7.69 % of the longest span); by the formula 9" in shown(capsys, *interleaved, "--costs", "3,4,2")
    late = shown(capsys, *interleaved, "--latency", "2")
    assert "no closed formula holds here" in late and json.loads(shown(capsys, *interleaved, "--latency", "2", "--json"))["formula"] is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_trace_in_virtual_time_is_the_drawing(name, tmp_path, capsys):
    """The program that ran ends when the drawing does, under any schedule, with messages that take time."""
    path, told = tmp_path / "trace.json", ("schedule", "--mesh", "pp=2", "--micro-batches", "3", "--schedule", name)
    drawn = json.loads(shown(capsys, *told, "--costs", "3,4,2", "--latency", "0.5", "--json", "--trace", str(path)))
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) / 1e6 == drawn["makespan"]
    assert {event["name"] for event in spans} >= {"F", "B", "W"}
