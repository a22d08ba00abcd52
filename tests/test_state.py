"""Mamba over context-parallel ranks: every option is the layer, and sends what its formula says."""
from drawn import check
from strategies_state import situations

from refpar.oracle import properties_state


def test_context_state(world):
    check(world, properties_state.context_state, situations(world.size or 6), 40 if world.kind == "threads" else 6)


def test_context_state_counts(world):
    check(world, properties_state.context_state_counts, situations(world.size or 6), 40 if world.kind == "threads" else 4)
