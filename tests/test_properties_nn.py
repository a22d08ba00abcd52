"""The properties of the single process, on drawn situations of every family."""
import pytest
from drawn import check
from strategies import situations

from refpar.comm.threads import ThreadWorld
from refpar.oracle import properties_nn

NAMES = ("document_isolation", "causality", "split_invariance", "padding_is_nothing", "fast_equals_naive", "gradient_is_derivative",
         "shards_add_up")


@pytest.mark.parametrize("name", NAMES)
def test_it_holds(name):
    check(ThreadWorld(), getattr(properties_nn, name), situations(most_ranks=1), examples=40)
