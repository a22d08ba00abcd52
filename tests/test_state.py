"""Mamba over context-parallel ranks: every option is the layer, and sends what its formula says."""
import numpy as np
import pytest
from drawn import check
from strategies_state import situations

from refpar import watch
from refpar.comm.mesh import Axis
from refpar.comm.threads import ThreadWorld
from refpar.nn.seams import Seams
from refpar.oracle import properties_state
from refpar.oracle.situation_state import StateSituation
from refpar.parallel.mamba import mamba_seams
from refpar.parallel.order import columns, part_of
from refpar.parallel.reorder import order


def test_context_state(world):
    check(world, properties_state.context_state, situations(world.size or 6), 40 if world.kind == "threads" else 6)


def test_context_state_counts(world):
    check(world, properties_state.context_state_counts, situations(world.size or 6), 40 if world.kind == "threads" else 4)


@pytest.mark.parametrize("kind", ["mamba1", "mamba2"])
def test_a_batch_that_does_not_know_its_rows_is_refused(kind):
    model = StateSituation(kind=kind).model

    def program(wire):
        cp = Axis.world(wire)
        batch = part_of(StateSituation().batch(), "contiguous", cp)._replace(whole=None)
        layer = properties_state.LAYERS[kind](model, Seams(**mamba_seams(model, kind, cp, "heads", "contiguous")))
        w = StateSituation(kind=kind).weights(layer.dims)
        x = np.zeros((*batch.tokens.shape, model.width))
        with pytest.raises(ValueError, match="must be a part of whole rows"):
            layer.forward(x, w, batch, layer.start(w, batch))
        with pytest.raises(ValueError, match="must be a part of whole rows"):
            order(cp, "zigzag", "contiguous").forward(x, batch)
    ThreadWorld().run(program, 1)


@pytest.mark.parametrize("ranks, length", [(3, 16), (4, 5), (1, 7), (5, 3), (2, 0)])
@pytest.mark.parametrize("was", ["zigzag", "striped", "contiguous"])
def test_order_brings_every_token_to_its_place(was, ranks, length):
    """And back, which is the transpose too; a token that stays where it is is not sent."""
    whole = StateSituation(tokens=length).batch()
    rows = np.arange(2 * length * 3.0).reshape(2, length, 3)

    def program(wire):
        cp = Axis.world(wire)
        held, wanted = (columns(way, length, ranks, cp.index) for way in (was, "contiguous"))
        batch, pair = part_of(whole, was, cp), order(cp, was, "contiguous")
        with watch.watching(watch.Ledger()) as ledger:
            there = pair.forward(rows[:, held], batch)
        np.testing.assert_array_equal(there, rows[:, wanted])
        np.testing.assert_array_equal(pair.backward(there, batch), rows[:, held])
        assert ledger.sent("world", "order") == (ranks - 1, 2 * 3 * 8 * len(np.setdiff1d(held, wanted)))
    ThreadWorld().run(program, ranks)
