"""Attention over context-parallel ranks: every option is attention, sends what its formula says, and is refused with a sentence."""
import numpy as np
import pytest
from drawn import check
from strategies_comm import drawn_once
from strategies_cp import situations

from refpar.comm.mesh import Axis
from refpar.comm.threads import ThreadWorld
from refpar.nn import attention
from refpar.oracle import properties_cp
from refpar.oracle.situation_cp import ContextSituation
from refpar.parallel.context import ring
from refpar.parallel.order import columns, part_of
from refpar.parallel.travel import rings, round_trip
from refpar.parallel.ulysses import group_size, head_parts, ulysses

EXAMPLES = 60


def test_context_attention(world):
    check(world, properties_cp.context_attention, situations(world.size or 6), EXAMPLES if world.kind == "threads" else 10)


def test_context_counts(world):
    check(world, properties_cp.context_counts, situations(world.size or 6), EXAMPLES if world.kind == "threads" else 5)
