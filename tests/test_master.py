"""The master property on drawn situations, on both wires, and proofs that the drawn situations reach the hard corners."""
import dataclasses

import pytest
from drawn import check
from hypothesis import find, given, settings
from hypothesis.errors import NoSuchExample
from strategies import situations

from refpar.cli import parse
from refpar.commands.verify import situation_of
from refpar.config import Layout, parse_model
from refpar.corpus import micro_batches
from refpar.oracle.properties import sharded_equals_single


def test_sharded_equals_single(world):
    check(world, sharded_equals_single, situations(most_ranks=5 if world.kind == "threads" else 4), examples=60)


def counts(situation, step=0):
    """Targets on each dp rank."""
    dp = situation.layout.dp
    return [sum(situation.batch(step, part).count for part in micro_batches(situation.rows(step), dp, rank,
                                                                           situation.training.micro_batches)) for rank in range(dp)]


CORNERS = {
    "one rank": lambda s: s.layout.dp == 1,
    "a rank without rows": lambda s: s.layout.dp > s.training.rows,
    "unequal rows": lambda s: s.training.rows % s.layout.dp and s.layout.dp < s.training.rows,
    "unequal counts of targets": lambda s: len(set(counts(s))) > 1,
    "a rank with rows and no target": lambda s: s.layout.dp <= s.training.rows and 0 in counts(s) and any(counts(s)),
    "a step without any target": lambda s: not any(counts(s)),
    "unequal micro-batches": lambda s: (s.training.rows // s.layout.dp) % s.training.micro_batches,
    "an empty micro-batch": lambda s: s.training.micro_batches > s.training.rows,
    "one micro-batch": lambda s: s.training.micro_batches == 1,
    "a last incomplete window": lambda s: 0 < s.last_rows < s.training.rows,
    "several documents in a row": lambda s: max(s.documents) < s.training.sequence,
    "a document over two rows": lambda s: (s.batch(0).position[:, 0] > 0).any(),
    "a row shorter than the conv": lambda s: "mamba2" in s.model.pattern and s.training.sequence < s.model.conv,
    "several chunks, the last shorter": lambda s: "mamba2" in s.model.pattern and s.training.sequence % s.model.chunk > 0
                                                  and s.training.sequence > s.model.chunk,
    "groups that do not divide 2": lambda s: "mamba2" in s.model.pattern and s.model.groups == 3,
    "more ranks than key heads": lambda s: "attention" in s.model.pattern and s.layout.dp > s.model.kv_heads,
    "a hybrid": lambda s: {"attention", "mamba2"} <= set(s.model.pattern),
    "tied": lambda s: s.model.tied,
    "dropout": lambda s: s.model.dropout > 0,
    "clipped": lambda s: s.training.clip == 0.1,
    "sgd": lambda s: s.training.optimizer == "sgd",
    "float32": lambda s: s.training.dtype == "float32",
}


@pytest.mark.parametrize("corner", CORNERS)
def test_situations_reach(corner):
    try:
        find(situations(), lambda situation: bool(CORNERS[corner](situation)), settings=settings(max_examples=2000, database=None))
    except NoSuchExample:
        pytest.fail(f"no drawn situation has {corner}")


@settings(max_examples=50)
@given(situations())
def test_a_situation_prints_the_command_that_repeats_it(situation):
    words = situation.command().split()
    assert words[:4] == ["python", "-m", "refpar", "verify"]
    args = parse("verify", words[4:])
    again = situation_of(args, parse_model(args.model), Layout.parse(args.mesh))
    assert again == dataclasses.replace(situation, ignored=again.ignored) and (any(again.ignored) == any(situation.ignored))
