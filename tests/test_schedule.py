"""Schedules as data: every generator, for any sizes, checked, printed, parsed; wrong ones refused; time and memory by formula."""
import csv
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refpar.schedules.check import Rule, check, in_flight
from refpar.parallel.schedule import Op, Schedule
from refpar.plan.bubble import FORMULAS, Sizes, Times, bubble
from refpar.schedules.generate import GENERATORS, generate
from refpar.schedules.parse import parse
from refpar.schedules.simulate import Costs, simulate
from refpar.show.schedule import chart, draw

VIRTUAL = {"interleaved": (1, 2, 3), "zb-v": (2,)}
SLICES = {"sliced": (1, 2, 3), "forward-only": (1, 2, 3)}


@st.composite
def pipelines(draw, names=tuple(GENERATORS)):
    """(schedule, its sizes): fewer micro-batches than ranks are as likely as more."""
    name = draw(st.sampled_from(names))
    ranks = draw(st.integers(1, 6)) if name != "dualpipe" else 2 * draw(st.integers(1, 3))
    micros = draw(st.one_of(st.integers(1, ranks), st.integers(1, 15)))
    virtual, slices = draw(st.sampled_from(VIRTUAL.get(name, (1,)))), draw(st.sampled_from(SLICES.get(name, (1,))))
    return generate(name, ranks, micros, virtual, slices), Sizes(ranks, micros, virtual, slices)


def peaks(schedule: Schedule) -> tuple:
    return tuple(max(counts, default=0) for counts in in_flight(schedule))


def shared(F, B, W, sizes) -> Costs:
    """Costs of one op, where F, B and W are of a rank's whole share and a whole micro-batch."""
    ops = sizes.v * sizes.K
    return Costs(Fraction(F, ops), Fraction(B, ops), Fraction(W, ops))


@given(pipelines())
@settings(max_examples=60)
def test_every_schedule_is_accepted_and_is_what_it_prints(made):
    schedule, _ = made
    check(schedule)
    assert parse(str(schedule)) == schedule
    assert all(held <= bound for held, bound in zip(peaks(schedule), schedule.bound))


def test_the_text_of_a_schedule():
    text = str(generate("1f1b", 2, 2))
    assert text == "\n".join(["schedule 1f1b micros=2 slices=1 copies=1 backward=1 flush=1 places=0,1 bound=2,1",
                              "0: 0F0 0F1  0BW0 0BW1", "1: 1F0 1BW0 1F1  1BW1"])
    assert str(Op("F", 2, 0)) == "2F0" and str(Op("W", 2, 0, 1)) == "2W0.1"
    row = "1F0 6F1 1F2 6F3 1F4 6BW1 6F5+1BW0 1F6+6BW3 6F7+1BW2 6BW5 1BW4 6B7 1B6 6W7 1W6"    # BW until half of the last backwards
    assert str(generate("dualpipe", 4, 8)).split("\n")[2].split() == ["1:", *row.split()]


def test_what_a_runner_asks_of_an_op():
    schedule = generate("zb-v", 2, 3)
    assert schedule.places == (0, 1, 1, 0)
    assert [schedule.giver(Op(kind, 1, 0)) for kind in ("F", "B", "BW", "W")] == [0, 2, 2, None]
    assert [schedule.taker(Op(kind, 1, 0)) for kind in ("F", "B", "BW", "W")] == [2, 0, 0, None]
    ends = generate("dualpipe", 2, 4)                       # two pipelines: nothing leads from stage 1 to stage 2
    assert ends.depth == 2 and [ends.giver(Op("F", stage, 0)) for stage in range(4)] == [None, 0, None, 2]
    assert [ends.taker(Op("BW", stage, 0)) for stage in range(4)] == [None, 0, None, 2]
    cut = generate("sliced", 2, 1, slices=3)
    assert cut.needs(Op("F", 1, 0, 1)) == [Op("F", 0, 0, 1), Op("F", 1, 0, 0)]
    assert cut.needs(Op("BW", 0, 0, 1)) == [Op("B", 1, 0, 1), Op("B", 0, 0, 2), Op("F", 0, 0, 1)]


# Wrong schedules are refused.

def edited(schedule: Schedule, rank: int, change) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    change(rows[rank])
    return replace(schedule, rows=tuple(map(tuple, rows)))


HEAD = "schedule mine micros={} slices=1 copies=1 backward=1 flush=1 places=0,1 bound=2,2\n"


@given(pipelines(), st.data())
@settings(max_examples=60)
def test_a_dropped_a_doubled_and_a_displaced_op_are_refused(made, data):
    schedule, _ = made
    rank = data.draw(st.integers(0, len(schedule.rows) - 1))
    at = data.draw(st.integers(0, len(schedule.rows[rank]) - 1)) if schedule.rows[rank] else assume(False)
    slot = schedule.rows[rank][at]
    with pytest.raises(ValueError, match=f"({'|'.join(str(part) for op in slot for part in op.parts)}) is missing on rank {rank}"):
        check(edited(schedule, rank, lambda row: row.pop(at)))
    with pytest.raises(ValueError, match="is done twice"):
        check(edited(schedule, rank, lambda row: row.append(slot)))
    if len(schedule.rows) > 1:
        other = (rank + 1) % len(schedule.rows)
        moved = edited(edited(schedule, rank, lambda row: row.pop(at)), other, lambda row: row.append(slot))
        with pytest.raises(ValueError, match=rf"stands on rank {other}, and rank {rank} holds stage"):
            check(moved)


@given(pipelines(), st.data())
@settings(max_examples=60)
def test_a_backward_before_its_forward_is_refused(made, data):
    schedule, _ = made
    assume(schedule.backward)
    rank, at, op = data.draw(st.sampled_from([(rank, at, op) for rank, at, op in schedule.ops() if op.kind != "F"]))
    need = {"W": "B"}.get(op.kind, "F")
    before = [op._replace(kind=kind) for kind in (need, "BW")]
    first = next(i for i, slot in enumerate(schedule.rows[rank]) if set(slot) & set(before))
    with pytest.raises(ValueError, match="which stands") as told:
        check(edited(schedule, rank, lambda row: row.insert(first, row.pop(at))))
    assert "[" in str(told.value).split("\n", 1)[1], "the place is marked in the grid"


@given(pipelines(("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "forward-only")), st.data())
@settings(max_examples=40)
def test_messages_in_another_order_are_refused(made, data):
    """Two forwards of one stage change places: what the stage before sends would be taken for the other."""
    schedule, sizes = made
    assume(sizes.p > 1 and sizes.m > 1)
    rank, micro = data.draw(st.integers(0, sizes.p - 1)), data.draw(st.integers(0, sizes.m - 2))
    swap = {Op("F", rank, micro): Op("F", rank, micro + 1), Op("F", rank, micro + 1): Op("F", rank, micro)}
    with pytest.raises(ValueError, match="sends .* before what it takes|which stands behind it|deadlock"):
        rows = [tuple(tuple(swap.get(op, op) for op in slot) for slot in row) for row in schedule.rows]
        check(replace(schedule, rows=tuple(rows)))


def test_a_wrong_schedule_is_told_with_its_place():
    with pytest.raises(ValueError) as told:
        check(parse("schedule mine micros=1 slices=1 copies=1 backward=1 flush=1 places=0,1 bound=1,1\n0: 0F0 0BW0\n1: 1BW0 1F0"))
    assert str(told.value) == ("schedule mine: 1BW0 needs 1F0, which stands behind it on rank 1\n"
                               "0: 0F0    0BW0\n1: [1BW0] [1F0]")


def test_a_stage_before_the_one_that_it_needs_is_refused():
    """Rank 0 holds stages 0 and 2, and runs 2 first; across ranks the same is a circle."""
    head = "schedule mine micros=1 slices=1 copies=1 backward=0 flush=1 places=0,1,0 bound=0,0\n"
    with pytest.raises(ValueError, match="deadlock: rank . before .F0, waits for rank . before .F0, waits for rank"):
        check(parse(head + "0: 2F0 0F0\n1: 1F0"))


def test_a_circle_through_backward_is_refused():
    """Rank 0 wants a micro-batch back before it sends the next, and rank 1 wants both first."""
    with pytest.raises(ValueError, match="deadlock") as told:
        check(parse(HEAD.format(2) + "0: 0F0 0BW0 0F1 0BW1\n1: 1F0 1F1 1BW0 1BW1"))
    assert "[" in str(told.value).split("\n")[1] and "[" in str(told.value).split("\n")[2], "both ranks are marked"


def test_a_slot_cannot_use_what_it_makes():
    with pytest.raises(ValueError, match="1BW0 needs 1F0, which stands in the same slot on rank 1"):
        check(parse(HEAD.format(1) + "0: 0F0 0BW0\n1: 1F0+1BW0"))


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "forward-only"])
def test_more_activations_than_the_bound_are_refused(name):
    schedule = generate(name, 4, 8)
    for rank, bound in enumerate(schedule.bound):
        tight = replace(schedule, bound=tuple(bound - (r == rank) for r, bound in enumerate(schedule.bound)))
        with pytest.raises(ValueError, match=f"rank {rank} holds activations of {bound} ops, and its bound is {bound - 1}\n"):
            check(tight)
    with pytest.raises(ValueError, match="\n0: 0F0 0F1 0F2 0F3 0F4 .0F5."):
        check(replace(generate("gpipe", 4, 6), bound=(5, 6, 6, 6)))


@pytest.mark.parametrize("micros", [1, 2, 3])
def test_f10_a_warm_up_longer_than_the_micro_batches_is_refused(micros):
    """The fault: rank 0 of 4 runs four forwards ahead, however few there are."""
    check(generate("1f1b", 4, micros))
    row = [Op("F", 0, i) for i in range(4)] + [Op("BW", 0, i) for i in range(micros)]
    with pytest.raises(ValueError, match=f"0F{micros} on rank 0 is no work of this schedule"):
        check(edited(generate("1f1b", 4, micros), 0, lambda old: old.__setitem__(slice(None), [(op,) for op in row])))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"])
def test_f9_blocking_sends_deadlock_and_receives_posted_ahead_do_not(name):
    """Both neighbours send before either receives: hidden by a wire that buffers, found by a rendezvous."""
    schedule = generate(name, 2, 4)
    with pytest.raises(ValueError, match="deadlock: rank . with what it sent by .*, waits for rank") as told:
        check(schedule, Rule(ahead=0, behind=0))
    assert "[" in str(told.value).split("\n", 1)[1]
    check(schedule)


@pytest.mark.parametrize("told, sentence", [
    ("", "must be: schedule NAME"), ("schedule x micros=1", "must be: schedule NAME"),
    ("schedule x micros=1 slices=1 copies=1 backward=1 flush=1 places=0 bound=1\n1: 0F0", "must begin with `0:`"),
    ("schedule x micros=1 slices=1 copies=1 backward=1 flush=1 places=0 bound=1\n0: 0F0 0G0", "'0G0' on rank 0 is no op"),
    ("schedule x micros=1 slices=1 copies=1 backward=1 flush=1 places=0,1 bound=1\n0: 0F0 0BW0", "do not fit 1 ranks")])
def test_bad_text_is_refused(told, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(told)


@pytest.mark.parametrize("arguments, sentence", [
    (("2f2b", 2, 2), "must be one of gpipe 1f1b"), (("dualpipe", 3, 6), "3 ranks must be an even number"),
    (("1f1b", 2, 2, 2), "2 virtual stages were asked for, and it has 1"), (("zb-v", 2, 2, 3), "its V has 2 on each rank"),
    (("gpipe", 2, 2, None, 2), "2 slices were asked for, and it has 1"), (("gpipe", 0, 2), "0 ranks"),
    (("sliced", 2, 2, None, 0), "0 slices")])
def test_a_schedule_that_cannot_be_is_refused(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(*arguments)


# Time and memory.

@given(pipelines(), st.tuples(*[st.integers(1, 9)] * 3))
@settings(max_examples=80)
def test_bubble_and_activations_equal_their_formulas(made, times):
    schedule, sizes = made
    line = simulate(schedule, shared(*times, sizes))
    formula = bubble(schedule.name, sizes, *map(Fraction, times))
    assert formula is None or line.bubble == formula
    if FORMULAS[schedule.name].exact(sizes, Times(1, 1, 1, 3)):
        assert peaks(schedule) == schedule.bound


@pytest.mark.parametrize("name", GENERATORS)
def test_every_formula_is_met_where_it_holds(name):
    """A row that is never exact would pass the test above: here each is, for equal times."""
    sizes = Sizes(4, 12, *{"interleaved": (3, 1), "zb-v": (2, 1), "sliced": (1, 2)}.get(name, (1, 1)))
    schedule = generate(name, *sizes)
    line = simulate(schedule, shared(1, 1, 1, sizes))
    assert line.bubble == bubble(name, sizes, Fraction(1), Fraction(1), Fraction(1)) and peaks(schedule) == schedule.bound
    survey = {"gpipe": 9, "1f1b": 9, "eager-1f1b": 9, "pipedream": 9, "interleaved": 3, "zb-h1": 3, "zb-h2": 0, "zb-v": 0,
              "dualpipe": 2, "sliced": Fraction(9, 2), "forward-only": 0}
    assert line.bubble == survey[name]


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "dualpipe"])
@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_zero_bubble_for_any_times(name, ranks):
    sizes = Sizes(ranks, 2 * ranks + 2, 1 + (name == "zb-v"))
    schedule = generate(name, ranks, sizes.m)
    for times in product((1, 2, 5), repeat=3):
        formula = bubble(name, sizes, *times)
        assert formula in (None, simulate(schedule, shared(*times, sizes)).bubble), times


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("F, B, W, pair", [(2, 2, 2, 5), (4, 4, 3, 9), (4, 4, 2, 7), (5, 4, 3, 9), (5, 4, 3, 11)])
def test_dualpipe_with_pairs_that_overlap(ranks, F, B, W, pair):
    sizes = Sizes(ranks, 2 * ranks + 2)
    line = simulate(generate("dualpipe", ranks, sizes.m), Costs(F, B, W, pair=pair))
    assert line.bubble == bubble("dualpipe", sizes, F, B, W, pair)
    if F == B:                                              # the table's formula, whose B is B + W
        assert line.bubble == (ranks // 2 - 1) * (pair + (B + W) - 3 * W)


def test_the_makespan_of_forward_alone_and_the_survey_s_activations():
    assert simulate(generate("forward-only", 4, 6), Costs(F=2)).makespan == (6 + 4 - 1) * 2
    p, v = 4, 3
    assert Fraction(peaks(generate("interleaved", p, 8, v))[0], v) == p * (1 + Fraction(p - 1, p * v))


def test_pipedream_idles_only_when_it_begins_and_ends():
    """Between the first backward and the last forward no rank waits; each update happens without an end of the pipe."""
    line = simulate(generate("pipedream", 4, 20))
    assert not line.schedule.flush
    for row, times in zip(line.schedule.rows, line.times):
        kinds = [slot[0].kind for slot in row]
        steady = times[kinds.index("BW"):len(kinds) - kinds[::-1].index("F")]
        assert all(end == start for (_, end), (start, _) in zip(steady, steady[1:]))


def test_unequal_stages_and_latency():
    """m times the slowest stage and once the others; a message takes its latency on the way up and down."""
    line = simulate(generate("gpipe", 3, 5), Costs(F=[1, 4, 1], B=[1, 5, 1], W=[1, 3, 1], latency=0))
    assert line.makespan == 5 * (4 + 8) + 2 * (1 + 2)
    assert simulate(generate("1f1b", 4, 1), Costs(1, 1, 1, latency=10)).makespan == 4 * 3 + 2 * 3 * 10


RATES = Path(__file__).parent / "recordings" / "zero_bubble_rates.csv"


@pytest.mark.parametrize("row", list(csv.DictReader(RATES.read_text().splitlines())),
                         ids=lambda row: "-".join(row[key] for key in ("schedule", "p", "m")))
def test_the_rates_of_the_zero_bubble_paper(row):
    """Tables 5 and 6 of arXiv:2401.10241, to their four digits: messages as pure latency, 1F1B's backward not split."""
    costs = Costs(*[Fraction(row[key]) for key in ("TF_ms", "TB_ms", "TW_ms", "Tcomm_ms")])
    line = simulate(generate(row["schedule"].lower(), int(row["p"]), int(row["m"])), costs)
    assert f"{float(line.rate):.4f}" == f"{float(row['bubble_rate']):.4f}"


# The picture.

def test_the_picture():
    assert chart(simulate(generate("1f1b", 2, 2), Costs(1, 1, 1))) == [
        "rank 0  0F0 0F1 .       0BW0    .   0BW1", "rank 1  .   1F0 1BW0    1F1 1BW1    ."]
    told = draw(generate("zb-h1", 4, 6))
    assert "makespan 21: work 18, bubble 3 (14.29 % of the longest span)" in told and "4 4 4 4 (bound 4 4 4 4)" in told


@given(pipelines(), st.tuples(*[st.sampled_from((1, 2, Fraction(1, 3), 0.25))] * 3))
@settings(max_examples=30)
def test_every_schedule_is_drawn(made, times):
    schedule, _ = made
    told = draw(schedule, Costs(*times))
    assert len([line for line in told.split("\n") if line.startswith("rank ")]) == len(schedule.rows)
    assert all(len(line) <= 160 for line in told.split("\n"))
