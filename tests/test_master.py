"""The master property on drawn situations, on both wires, and proofs that the drawn situations reach the hard corners."""
import dataclasses

import pytest
from drawn import check, first
from hypothesis import given, settings
from pool.mpipool import PoolWorld
from strategies import GPT2, PIPELINES, TRANSFORMER, models, situations

from refpar.cli import layout_of, parse
from refpar.commands.verify import situation_of
from refpar.comm.threads import ThreadWorld
from refpar.config import CP_MAMBA, PRESETS, Layout, Training
from refpar.corpus import micro_batches
from refpar.named import parse_model
from refpar.oracle.properties import sharded_equals_single
from refpar.oracle.situation import Situation


def test_sharded_equals_single(world):
    check(world, sharded_equals_single, situations(most_ranks=16 if world.kind == "threads" else 4), examples=40)


def test_sharded_equals_single_on_eight_processes(mpi):
    world = PoolWorld(size=8)
    try:
        check(world, sharded_equals_single, situations(8).filter(lambda situation: situation.layout.ranks > 4), examples=10)
    finally:
        world.close()


def counts(situation, step=0):
    """Targets on each dp rank."""
    dp = situation.layout.dp
    return [sum(situation.batch(step, part).count for part in micro_batches(situation.rows(step), dp, rank,
                                                                           situation.training.micro_batches)) for rank in range(dp)]


UNEVEN = PRESETS["hybrid-uneven"]


@pytest.mark.parametrize("layout", [Layout(dp=3, tp=2), Layout(cp=3, tp=2)], ids=str)
def test_replicas_beside_uneven_shards(layout):
    """Three ranks' sums depend on their order, which a ring takes by the place in a bucket: it must not depend on shards' sizes."""
    sharded_equals_single(ThreadWorld(), Situation(UNEVEN, layout, Training(dtype="float64", rows=3, sequence=12, steps=1)))


@pytest.mark.parametrize("cp_mamba", CP_MAMBA)
def test_slices_under_options_of_cp(cp_mamba):
    """On one rank of cp its options change nothing: not where a slice's tokens stand, nor what is kept of the slice before."""
    layout = Layout(pp=2, schedule="sliced", slices=3, recompute="full", cp_attention="zigzag", cp_mamba=cp_mamba)
    training = Training(dtype="float64", rows=1, sequence=8, steps=1)
    sharded_equals_single(ThreadWorld(), Situation(UNEVEN, layout, training, documents=(5, 9)))


DRAWN = situations(16)
CORNERS = {
    "three replicas beside uneven shards": lambda s: s.layout.dp * s.layout.cp > 2 and s.layout.tp > 1 and (
        s.model.ffn % s.layout.tp or s.model.inner % s.layout.tp),
    "one rank": lambda s: s.layout.ranks == 1,
    "dp and tp together": lambda s: s.layout.dp > 1 < s.layout.tp,
    "tp outside dp": lambda s: s.layout.dp > 1 < s.layout.tp and s.layout.order[0] == "tp",
    "sequence parallelism": lambda s: s.layout.sp and s.layout.tp > 1,
    "a sequence that tp does not divide": lambda s: s.layout.sp and s.training.sequence % s.layout.tp,
    "a rank without tokens outside the layers": lambda s: s.layout.sp and s.training.sequence < s.layout.tp,
    "key heads that tp does not divide": lambda s: "attention" in s.model.pattern and 1 < s.layout.tp < s.model.kv_heads,
    "more tp ranks than key heads": lambda s: "attention" in s.model.pattern and s.model.kv_heads < s.layout.tp <= s.model.heads,
    "a run of ranks for some key heads, and not for others": lambda s: "attention" in s.model.pattern
        and 1 < s.model.kv_heads < s.layout.tp and s.layout.tp % s.model.kv_heads,
    "a rank without heads": lambda s: "attention" in s.model.pattern and s.layout.tp > s.model.heads,
    "groups that tp does not divide": lambda s: "mamba2" in s.model.pattern and 1 < s.layout.tp < s.model.groups,
    "more tp ranks than groups": lambda s: "mamba2" in s.model.pattern and 1 < s.model.groups < s.layout.tp,
    "a group of the norm on several ranks": lambda s: "mamba2" in s.model.pattern and s.layout.tp > 1
        and s.model.norm_width == s.model.ssm_heads * s.model.ssm_head_width > s.model.ssm_head_width,
    "a rank without channels": lambda s: {"mamba1", "mamba2"} & set(s.model.pattern)
        and s.layout.tp > min(s.model.inner, s.model.ssm_heads),
    "a rank without words": lambda s: s.layout.tp > s.model.vocab,
    "a rank with pads of the vocabulary alone": lambda s: s.model.padded_vocab and
        s.model.part("V", s.layout.tp, s.layout.tp - 1).start >= s.model.vocab,
    "tied and cut": lambda s: s.model.tied and s.layout.tp > 1,
    "dropout of cut heads": lambda s: "attention" in s.model.pattern and s.model.dropout and s.layout.tp > 1 and s.model.heads > 1,
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
    "mamba1": lambda s: "mamba1" in s.model.pattern,
    "a core computed again": lambda s: s.layout.recompute == "selective" and "attention" in s.model.pattern,
    "a cut layer computed again": lambda s: s.layout.recompute == "full" and s.layout.tp > 1 < s.layout.cp,
    "fewer micro-batches than stages": lambda s: s.training.micro_batches < s.layout.pp,
    "a table shared by two stages": lambda s: s.model.tied and s.layout.pp > 1,
    "a stage without layers": lambda s: s.layout.pp > len(s.model.pattern) * s.model.blocks + 1,
    "slices, each cut over cp": lambda s: s.layout.schedule == "sliced" and s.layout.pp > 1 < s.layout.cp and s.layout.slices == 3,
    "all four axes": lambda s: min(s.layout.dp, s.layout.pp, s.layout.cp, s.layout.tp) > 1,
    "Mamba by heads in slices": lambda s: s.layout.pp > 1 and s.layout.schedule == "sliced" and s.layout.cp_mamba == "heads"
        and {"mamba1", "mamba2"} & set(s.model.pattern),
    **{f"schedule {name}": lambda s, name=name: s.layout.pp > 1 and s.layout.schedule == name for name in PIPELINES},
    "mamba2 behind mamba1, or before": lambda s: {"mamba1", "mamba2"} <= set(s.model.pattern),
    "a row alone": lambda s: s.training.rows == 1,
    "no biases": lambda s: "mamba2" in s.model.pattern and not s.model.conv_bias and not s.model.dt_bias,
    "limits of the time step": lambda s: "mamba2" in s.model.pattern and s.model.dt_least > 0 and s.model.dt_most > 0,
    "a skip for each channel": lambda s: "mamba2" in s.model.pattern and s.model.skip_by == "channel",
    "one norm over all groups": lambda s: "mamba2" in s.model.pattern and s.model.groups > 1
                                          and s.model.norm_group == s.model.ssm_heads * s.model.ssm_head_width,
    "norm first": lambda s: "mamba2" in s.model.pattern and s.model.norm_first,
    "a conv without activation": lambda s: "mamba1" in s.model.pattern and s.model.conv_act == "none",
    "a hybrid": lambda s: {"attention", "mamba2"} <= set(s.model.pattern),
    "tied": lambda s: s.model.tied,
    "dropout": lambda s: s.model.dropout > 0,
    "a window shorter than a document": lambda s: "attention" in s.model.pattern and 0 < s.model.window < min(
        max(s.documents), s.training.sequence),
    "a pair between the two ends of Llama 3's scaling": lambda s: s.model.rope_scaling == "llama3" and s.model.positions == "rope"
        and s.model.rope_original == 30 and s.model.head_width > 4 and s.model.rope_factor > 1,
    "the last learned position": lambda s: s.model.positions == "learned" and s.batch(0).position.max() + 1 == s.model.longest,
    "GPT-2's options together": lambda s: "attention" in s.model.pattern and GPT2.items() <= vars(s.model).items(),
    "clipped": lambda s: s.training.clip == 0.1,
    "sgd": lambda s: s.training.optimizer == "sgd",
    "float32": lambda s: s.training.dtype == "float32",
}


@pytest.mark.parametrize("corner", CORNERS)
def test_situations_reach(corner):
    assert first(DRAWN, CORNERS[corner]) is not None


def test_situations_reach_every_option():
    """Each option of the Transformer takes each of its values, beside attention."""
    drawn = models()
    for name, values in TRANSFORMER.items():
        for value in values:
            assert first(drawn, lambda model: "attention" in model.pattern and getattr(model, name) == value), (name, value)


@settings(max_examples=50)
@given(situations())
def test_a_situation_prints_the_command_that_repeats_it(situation):
    words = situation.command().split()
    assert words[:4] == ["python", "-m", "refpar", "verify"]
    args = parse("verify", words[4:])
    again = situation_of(args, parse_model(args.model), layout_of(args, args.mesh))
    assert again == dataclasses.replace(situation, ignored=again.ignored) and (any(again.ignored) == any(situation.ignored))
