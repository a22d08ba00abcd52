"""The catalogue: every fault is killed by its property where it shows, and lives where it hides; the right code passes both."""
import pytest
import strategies
import strategies_comm
import strategies_cp
import strategies_loss
import strategies_pp
import strategies_reshard
import strategies_state
from drawn import first, thread_worlds
from hypothesis import strategies as st
from test_properties_nn import NAMES

from refpar.comm.threads import ThreadWorld
from refpar.config import AXES, Layout
from refpar.oracle.faults import FAULTS, fault_named, property_of
from refpar.oracle.plant import PlantedWorld, planted

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")         # faulty code takes nothing from nothing

IDS = [fault.name for fault in FAULTS]
SITUATIONS = {
    "sharded_equals_single": strategies.situations(4),
    **dict.fromkeys(("pipeline_equals_one_place", "in_flight_is_the_formula"), strategies_pp.situations(4)),
    "conjugate": strategies_comm.situations(),
    "collective_means": strategies_comm.situations(),
    "one_rounding": strategies_comm.situations(),
    "mesh_is_a_grid": strategies_comm.layouts(),
    "reshard_is_cutting": strategies_reshard.situations(4),
    **dict.fromkeys(("fresh_is_cutting", "loading_is_cutting"), strategies_reshard.situations(4, most_stages=1)),
    "vocabulary_loss": strategies_loss.situations(),
    "context_attention": strategies_cp.situations(4),
    "pieces_cover": st.integers(0, 2**34),
    "context_state": strategies_state.situations(),
    **dict.fromkeys(NAMES, strategies.situations(1)),
}
DRAWN = {name: st.tuples(drawn, thread_worlds()) for name, drawn in SITUATIONS.items()}


def judge(fault, situation, world=ThreadWorld()) -> str | None:
    """What the property says with the fault planted on every rank, and the single process right."""
    with planted(fault):                # a fault whose text has gone from its function is no kill
        pass
    try:
        property_of(fault)(PlantedWorld(world, fault), situation)
    except Exception as error:          # whatever the program ends with, it does not pass for right
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_faults_are_killed_where_they_show(fault):
    assert judge(fault, fault.shows), f"{fault.property} holds with {fault.name} planted"


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_faults_are_killed_in_drawn_situations(fault):
    """No situation need be made for a fault: the strategy of its property soon draws one that shows it.  The world is drawn too:
    the order of ranks, and how long a message may be that leaves without its receiver.  Only runs that are cut over the fault's axes
    are judged: judging takes a hundred times as long as drawing."""
    about = cuts(fault.shows)
    found = first(DRAWN[fault.property], lambda one: about <= cuts(one[0]) and judge(fault, *one))
    assert found, f"{fault.property} holds with {fault.name} planted, in all that is drawn"
    situation, world = found
    property_of(fault)(world, situation)                # which the right code passes


def cuts(situation) -> set[str]:
    """The axes that cut a run, with "sp" among them: none where a situation is not of a run."""
    layout = getattr(situation, "layout", Layout())
    return {axis for axis in (*AXES, "sp") if getattr(layout, axis) > (axis != "sp")}


@pytest.mark.parametrize("name", ["local-count", "forgotten-norms", "reduced-both-ways"])
def test_faults_are_planted_on_every_rank(world, name):
    """On threads and on processes, and gone afterwards.  Without `planted`, what stands outside the world is right."""
    fault = fault_named(name)
    with pytest.raises(AssertionError):
        property_of(fault)(PlantedWorld(world, fault), fault.shows)
    property_of(fault)(world, fault.shows)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.hides is not None], ids=lambda fault: fault.name)
def test_faults_live_where_they_hide(fault):
    assert judge(fault, fault.hides) is None


@pytest.mark.parametrize("name, situation", {(fault.property, situation): None for fault in FAULTS
                                             for situation in (fault.shows, fault.hides) if situation is not None})
def test_the_right_code_passes_all_their_situations(name, situation):
    fault = next(fault for fault in FAULTS if fault.property == name)
    property_of(fault)(ThreadWorld(), situation)


def test_names_and_reports():
    assert len(set(IDS)) == len(IDS) and fault_named(IDS[0]) is FAULTS[0]
    for fault in FAULTS:
        repository, number = fault.report.split("#")
        assert repository.count("/") == 1 and number.isdigit()
    with pytest.raises(ValueError, match="fault 'nothing' is not in the catalogue"):
        fault_named("nothing")
