"""Drawn pipelines of small models: every schedule and option, few rows and tokens, so that a runner can be tried on many."""
from __future__ import annotations

from hypothesis import strategies as st

from refpar.config import CP_ATTENTION, CP_MAMBA, RECOMPUTE, SCHEDULES, Layout, Model, Training
from refpar.oracle.situation import Situation

TINY = dict(vocab=11, width=6, heads=2, kv_heads=1, head_width=4, ffn=5, ssm_heads=2, ssm_head_width=3, groups=1, state=3, inner=5,
            dt_rank=2, conv=3, chunk=4)
GPT2 = dict(norm="layer", positions="learned", longest=16, attention_bias="all", mlp="gelu", mlp_bias=True)
PATTERNS = (("attention", "mlp"), ("mamba2", "attention", "mamba1"), ("mamba2",), ("mamba1", "mlp"))


@st.composite
def models(draw) -> Model:
    """One or two blocks, so that there are stages without layers; tied or not; with and without dropout."""
    pattern, options = draw(st.sampled_from([(pattern, {}) for pattern in PATTERNS] + [(PATTERNS[0], GPT2)]))
    return Model(pattern=pattern, blocks=draw(st.integers(1, 2)), tied=draw(st.booleans()), dropout=draw(st.sampled_from((0.0, 0.3))),
                 **TINY, **options)


@st.composite
def layouts(draw, most_ranks: int) -> Layout:
    """Only pipelines; beside them sometimes two ranks of another axis."""
    name = draw(st.sampled_from((*SCHEDULES, "sliced")))                # which has more to hand on, and so more to get wrong
    pp = draw(st.sampled_from([size for size in ((2, 4) if name == "dualpipe" else (1, 2, 2, 3, 4)) if size <= most_ranks]))
    axis = draw(st.sampled_from(("dp", "dp", "tp", "cp"))) if 2 * pp <= most_ranks and draw(st.booleans()) else None
    ways = [way for way in CP_ATTENTION if not (name == "sliced" and axis == "cp" and way.startswith("ulysses"))]
    return Layout(**({axis: 2} if axis else {}), pp=pp, schedule=name, stages_by_cost=draw(st.booleans()),
                  virtual_stages=draw(st.integers(0, 3)) if name == "interleaved" else 0,
                  slices=draw(st.sampled_from((0, 1, 3, 3))) if name == "sliced" else 0, recompute=draw(st.sampled_from(RECOMPUTE)),
                  sp=axis == "tp" and draw(st.booleans()), cp_attention=draw(st.sampled_from(ways)),
                  cp_mamba=draw(st.sampled_from(CP_MAMBA)))


@st.composite
def situations(draw, most_ranks: int = 4) -> Situation:
    """Fewer micro-batches than stages, more than rows, rows shorter than slices, targets of one row alone: all are normal."""
    training = Training(steps=1, rows=draw(st.integers(1, 6)), sequence=draw(st.integers(1, 9)), micro_batches=draw(st.integers(1, 8)),
                        warmup=0, dtype="float64", seed=draw(st.integers(0, 3)))
    documents = (5, 9) if training.rows * training.sequence >= 9 else (1,)
    return Situation(draw(models()), draw(layouts(most_ranks)), training, 0, documents, draw(st.sampled_from(((0.0,), (0.0, 0.4, 1.0)))))
