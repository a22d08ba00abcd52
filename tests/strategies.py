"""Strategies that draw whole situations: a model of any sizes, a mesh, a batch as hostile as a text can make it.

What they must reach is tested in `test_master.py`; a property is worth what its situations reach.
"""
from __future__ import annotations

from hypothesis import strategies as st

from refpar.config import AXES, CP_ATTENTION, CP_MAMBA, RECOMPUTE, SCHEDULES, Layout, Model, Training
from refpar.oracle.situation import Situation

PATTERNS = (("attention", "mlp"), ("mamba2",), ("mamba1",), ("attention", "mlp", "mamba2"), ("mamba2", "mamba1", "mlp"),
            ("mamba1", "attention"))


# The options of the Transformer, and what each may be: drawn one by one, so that any two may meet.
TRANSFORMER = {
    "norm": ("rms", "layer"), "mlp": ("swiglu", "gelu", "gelu_tanh"), "mlp_bias": (False, True), "qk_norm": (False, True),
    "attention_bias": ("none", "qkv", "all"), "window": (0, 0, 1, 2, 4), "positions": ("rope", "rope", "learned", "none"),
    "longest": (9, 9, 12), "rope_pairs": ("interleaved", "halves"), "rope_scaling": ("none", "linear", "ntk", "llama3"),
    "rope_factor": (1.0, 4.0), "rope_original": (30, 8192), "softcap": (0.0, 0.0, 2.0), "smoothing": (0.0, 0.0, 0.2),
    "z_loss": (0.0, 0.0, 0.1),
}
GPT2 = {"norm": "layer", "positions": "learned", "attention_bias": "all", "mlp": "gelu_tanh", "mlp_bias": True, "tied": True}


@st.composite
def options(draw) -> dict:
    """Any options, and now and then those of GPT-2 together."""
    drawn = {name: draw(st.sampled_from(values)) for name, values in TRANSFORMER.items()} | {"tied": draw(st.booleans())}
    return drawn | draw(st.sampled_from(({}, {}, GPT2)))


@st.composite
def models(draw) -> Model:
    """Small models of each family, and hybrids, whose sizes divide nothing in particular.

    A tensor of one or two numbers may cancel to almost nothing, and its bound with it: then rounding far above it decides, and no
    bound of its own magnitude can hold.  So every contracted dim has at least three numbers.
    """
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    each, ssm_head_width = draw(st.integers(1, 3)), draw(st.integers(3, 5))
    return Model(pattern=draw(st.sampled_from(PATTERNS)), blocks=draw(st.integers(1, 2)), vocab=draw(st.integers(5, 13)),
                 padded_vocab=draw(st.sampled_from((0, 0, 0, 14, 16))),
                 width=draw(st.integers(4, 9)), heads=kv_heads * draw(st.integers(1, 3)), kv_heads=kv_heads,
                 head_width=2 * draw(st.integers(2, 3)), ffn=draw(st.integers(3, 9)), ssm_heads=groups * each,
                 ssm_head_width=ssm_head_width, groups=groups, state=draw(st.integers(3, 5)), conv=draw(st.integers(1, 5)),
                 chunk=draw(st.integers(1, 6)), dropout=draw(st.sampled_from((0.0, 0.0, 0.3))),
                 inner=draw(st.integers(3, 9)), dt_rank=draw(st.integers(3, 4)),
                 **draw(options()), **draw(ssm_variants(ssm_head_width, groups * each)))


@st.composite
def ssm_variants(draw, head_width: int, heads: int) -> dict:
    """Fields by which Mamba models differ; the limits cut off some of the time steps, and a norm takes a part of a head, or all."""
    return {"conv_bias": draw(st.booleans()), "conv_act": draw(st.sampled_from(("silu", "none"))), "dt_bias": draw(st.booleans()),
            "dt_least": draw(st.sampled_from((0.0, 0.003))), "dt_most": draw(st.sampled_from((0.0, 0.03))),
            "skip_by": draw(st.sampled_from(("head", "channel"))), "norm_first": draw(st.booleans()),
            "norm_group": draw(st.sampled_from((0, head_width, head_width * heads)))}


PIPELINES = SCHEDULES


@st.composite
def layouts(draw, most_ranks: int) -> Layout:
    """Data, pipeline, context and tensor parallelism, alone and together, with every option and schedule."""
    def size(*sizes):
        return 2 if every else draw(st.sampled_from([size for size in sizes if size <= most_ranks // taken] or [1]))
    every = most_ranks >= 16 and draw(st.integers(0, 9)) == 0           # all four axes at once
    sizes, taken = {}, 1
    for axis in draw(st.permutations(AXES)):                            # each may be the first, that has all ranks to choose from
        sizes[axis] = size(*{"dp": (1, 1, 2, 3, 4, 5), "pp": (1, 1, 2, 3, 4), "cp": (1, 1, 2, 3, 4), "tp": (1, 1, 2, 3, 4, 5, 8)}[axis])
        taken *= sizes[axis]
    dp, pp, cp, tp = (sizes[axis] for axis in AXES)
    schedule = draw(st.sampled_from([
        name for name in (*PIPELINES, "sliced") if name != "dualpipe" or pp % 2 == 0])) if pp > 1 else "1f1b"
    sp, ways = draw(st.booleans()), [way for way in CP_ATTENTION if schedule != "sliced" or not way.startswith("ulysses")]
    return Layout(pp=pp, schedule=schedule, virtual_stages=draw(st.integers(0, 3)) if schedule == "interleaved" else 0,
                  slices=draw(st.sampled_from((0, 1, 2, 3))) if schedule == "sliced" else 0,
                  stages_by_cost=draw(st.booleans()), recompute=draw(st.sampled_from((*RECOMPUTE, "mlp+mamba2", "attention+mamba1"))),
                  dp=dp, cp=cp, tp=tp, order=draw(st.sampled_from((AXES, AXES, ("tp", "pp", "cp", "dp")))), sp=sp,
                  cp_attention=draw(st.sampled_from(ways)), cp_mamba=draw(st.sampled_from(CP_MAMBA)),
                  tp_ring=sp and draw(st.booleans()), node=draw(st.sampled_from((0, 0, 2))))


@st.composite
def situations(draw, most_ranks: int = 8, layouts=layouts) -> Situation:
    """A run on a mesh: ranks without rows, heads, words or tokens, rows without targets, a last window with fewer rows than the
    others."""
    rows = draw(st.sampled_from((1, 1, 2, 3, 4, 5, 6, 7)))      # one alone is where shortcuts are taken
    training = Training(steps=2, rows=rows, sequence=draw(st.integers(1, 11)), micro_batches=draw(st.integers(1, 3)),
                        optimizer=draw(st.sampled_from(("adamw", "sgd"))), rate=0.01, warmup=0,
                        clip=draw(st.sampled_from((0.0, 0.1, 1e3))), seed=draw(st.integers(0, 999)),
                        dtype=draw(st.sampled_from(("float64", "float64", "float32"))))
    return Situation(draw(models()), draw(layouts(most_ranks)), training, last_rows=draw(st.integers(0, rows)),
                     documents=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))),
                     ignored=tuple(draw(st.lists(st.sampled_from((0.0, 0.4, 1.0)), min_size=1, max_size=4))))
