"""Faults of state-space models that one process shows already: state that is lost, leaks or decays where it must not.

As in `faults.py`.  What they have in common: short rows, one document, one group or one row at a time hide them.
"""
from __future__ import annotations

from dataclasses import replace

from refpar.config import PRESETS
from refpar.oracle.plant import Fault
from refpar.oracle.situation import PROOF, Situation

MODEL = replace(PRESETS["mamba2-uneven"], blocks=1)         # 9 heads in 3 groups, chunks of 7 tokens
ONE_DOCUMENT = (10_000,)


def read(rows: int = 2, documents=(5, 16), sequence: int = 16, **fields) -> Situation:
    """A short text on one rank."""
    return Situation(replace(MODEL, **fields), training=replace(PROOF, rows=rows, sequence=sequence), documents=documents)


SHOWS = read()
ONE_GROUP = read(groups=1)
ONE_TAP = read(conv=1)
SHORTEST = read(documents=(1,))             # each token begins a document, and needs no past
ONE_ROW = read(rows=1, documents=ONE_DOCUMENT)
ONE_CHUNK = read(rows=1, documents=ONE_DOCUMENT, chunk=16)
MAMBA1 = read(pattern=("mamba1",))

CONV, NORM = "refpar.nn.conv:conv_forward", "refpar.nn.gated_norm:group_norm_backward"
SSD, SPLIT, PADS = "refpar.nn.ssd:ssd_forward", "split_invariance", "padding_is_nothing"

# The norm's groups, and the groups of heads.
GROUPS = (
    Fault("backward-of-one-group", "state-spaces/mamba#547",
          "the norm's backward takes its statistic over the whole width, whatever the groups: gradients explode",
          NORM, "np.repeat(along / width, lengths, axis=2)", "along.sum(2, keepdims=True) / (width * len(lengths))",
          SHOWS, ONE_GROUP, "gradient_is_derivative"),
    Fault("norm-of-all-groups", "ggml-org/llama.cpp#15507",
          "the norm is taken over the whole width where the model has it group by group",
          "refpar.config:Model.norm_width", "self.ssm_heads // self.groups * self.ssm_head_width",
          "self.ssm_heads * self.ssm_head_width", SHOWS, ONE_GROUP, "shards_add_up"),
    Fault("groups-dealt-out", "vllm-project/vllm#13660",
          "heads are given their group in turn, where those of a group stand together",
          "refpar.nn.scan:group_of", "np.arange(heads) * groups // heads", "np.arange(heads) % groups", SHOWS, ONE_GROUP,
          "fast_equals_naive"),
)

# What a token sees.
SEEN = (
    Fault("wrong-end-of-the-conv", "state-spaces/mamba#437",
          "a padded conv answers with W-1 outputs too many, and the last are kept in place of the first: tokens see what follows",
          CONV, "np.concatenate([here.rows, x], axis=1)", "np.concatenate([x, here.rows], axis=1)", SHOWS, ONE_TAP, "causality"),
    Fault("conv-leaks", "NovaSky-AI/SkyRL#2056",
          "packed documents reset the scan and not the conv, whose window reaches into the document before",
          CONV, "early = np.nonzero(position < taps - 1)", "early = np.nonzero(position < 0)", SHOWS, ONE_TAP,
          "document_isolation"),
    Fault("scan-leaks", "NovaSky-AI/SkyRL#2056",
          "packed documents reset the conv and not the scan, whose state flows on into the next",
          "refpar.nn.ssm:by_position", "A_log, batch.position, before", "A_log, np.maximum(batch.position, 1), before", SHOWS,
          None, "document_isolation"),
    Fault("selective-scan-leaks", "NovaSky-AI/SkyRL#2056",
          "the same in Mamba-1: the state decays where a document begins, and must be gone",
          "refpar.nn.selective:decay_of", "a[position == 0] = 0", "a[position < 0] = 0", MAMBA1, None, "document_isolation"),
)

# What a piece of a text hands to the next, and a chunk to the next.
CARRIED = (
    Fault("state-not-carried", "state-spaces/mamba#641",
          "a call with several tokens begins with a state of zeros, whatever state it is given",
          SSD, "summary_of_state(before)", "summary_of_state(0 * before)", SHOWS, SHORTEST, SPLIT),
    Fault("conv-not-carried", "state-spaces/mamba#641",
          "a call with several tokens begins its conv with zeros, whatever inputs went before",
          CONV, "nothing_behind(before)", "nothing_behind(0 * before)", SHOWS, ONE_TAP, SPLIT),
    Fault("alone-without-a-state", "vllm-project/vllm#22034",
          "a shortcut for a batch of one sequence drops its state",
          SSD, "summary_of_state(before)", "summary_of_state(before * (len(x) > 1))", ONE_ROW, SHOWS, SPLIT),
    Fault("decay-from-the-wrong-place", "vllm-project/vllm#21783",
          "the decay since a chunk's start is read one place off, and the state before it weighs too much",
          "refpar.nn.ssd:decays", "since_start = np.exp(log)", "since_start = np.exp(log - log[:, :1])", SHOWS, ONE_CHUNK,
          "fast_equals_naive"),
    Fault("wrong-way-through-the-chunks", "huggingface/transformers#47246",
          "the states of chunks are combined along the wrong axis: the later before the earlier",
          SSD, "merge(here, summaries[i])", "merge(summaries[i], here)", SHOWS, ONE_CHUNK, "fast_equals_naive"),
)

# Pads.
PADDING = (
    Fault("pads-decay-the-state", "huggingface/transformers#48256",
          "nothing enters the state at a pad, but its time step is not 0, so the state decays",
          "refpar.nn.ssm:time_step", " * (position >= 0)[..., None]", "", SHOWS, None, PADS),
    Fault("pads-in-the-cache", "huggingface/transformers#48256",
          "the conv hands on the last places of the padded row, which are pads",
          CONV, "(position >= 0).sum(1)", "np.full(len(x), x.shape[1])", SHOWS, ONE_TAP, PADS),
    Fault("pads-in-the-conv", "huggingface/transformers#32677",
          "pads are inputs of the conv like any other, and tokens behind them see them",
          "refpar.nn.conv:tokens_first", "if (position >= 0).all():", "if True:", SHOWS, ONE_TAP, PADS),
    Fault("pads-of-a-lone-row", "huggingface/transformers#46773",
          "pads are masked only where there are several rows",
          "refpar.nn.conv:tokens_first", "if (position >= 0).all():", "if len(position) == 1 or (position >= 0).all():",
          read(rows=1), SHOWS, PADS),
)

STATE_SPACE: tuple[Fault, ...] = GROUPS + SEEN + CARRIED + PADDING
