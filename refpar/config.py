"""What a run is: sizes of a model, a layout of ranks, and how to train.  Frozen, and checked at birth.

A wrong size is refused here, in one sentence with its numbers, before a message is sent or a file written.
Sizes that follow from others are properties.  The letters are those of the glossary in `refpar/__init__.py`.
"""
from __future__ import annotations

import math
import sys
from dataclasses import dataclass

AXES = ("dp", "pp", "cp", "tp")          # outermost first: the survey's rank order (section 4.2, figures 4 and 5)


# The most that refpar, which teaches in numpy, takes on: beyond them a number is a slip, and would end in want of memory.
RANKS, LAYERS, PARAMETERS = 4096, 4096, 2**31
ROWS, SEQUENCE, MICRO_BATCHES, TOKENS = 2**20, 2**20, 4096, 2**26


def share(size: int, n: int, i: int, unit: int = 1) -> slice:
    """Shard i of n of a dim: size*i//n to size*(i+1)//n, counted in whole units (a head, a group).

    Any size works, n larger than size too: then some shards are empty.
    """
    units = size // unit
    return slice(units * i // n * unit, units * (i + 1) // n * unit)


def shares(size: int, n: int, unit: int = 1) -> list[int]:
    """The lengths of all n shards of a dim."""
    return [part.stop - part.start for part in (share(size, n, i, unit) for i in range(n))]


def run_of(units: int, ranks: int, rank: int) -> tuple[int, range]:
    """(unit, run): where there are more ranks than units, the unit that `rank` shares and the run of ranks that share it.  With
    fewer ranks each is a run of its own."""
    runs = [range(ranks)[share(ranks, min(units, ranks), unit)] for unit in range(min(units, ranks))]
    return next((unit, run) for unit, run in enumerate(runs) if rank in run)


def _require(holds: bool, sentence: str):
    if not holds:
        raise ValueError(sentence)


def _require_counts(what: str, config, *names: str):
    for name in names:
        size = getattr(config, name)
        _require(isinstance(size, int) and size >= 1, f"{what}: {name}={size} must be a whole number of at least 1")


_WORDS = {"norm": ("rms", "layer"), "mlp": ("swiglu", "gelu", "gelu_tanh"), "attention_bias": ("none", "qkv", "all"),
          "positions": ("rope", "learned", "none"), "rope_pairs": ("interleaved", "halves"),
          "rope_scaling": ("none", "linear", "ntk", "llama3"), "conv_act": ("silu", "none"), "skip_by": ("head", "channel")}


@dataclass(frozen=True)
class Model:
    """The sizes of one model.  `pattern` is the mixers and MLPs of one block, repeated `blocks` times."""
    pattern: tuple[str, ...] = ("attention", "mlp")
    blocks: int = 4
    vocab: int = 256            # bytes
    padded_vocab: int = 0       # V: words of the tables, some of them perhaps beyond the vocabulary; 0: as many as it has
    width: int = 64             # D
    heads: int = 8              # H  query heads
    kv_heads: int = 2           # K  key/value heads (GQA)
    head_width: int = 8         # E
    ffn: int = 192              # F
    rope_base: float = 10000.0
    ssm_heads: int = 8          # M
    ssm_head_width: int = 16    # P
    groups: int = 2             # G  of heads that share B and C
    state: int = 16             # N
    inner: int = 128            # I  width inside Mamba-1
    dt_rank: int = 4            # R  of Mamba-1's time step
    conv: int = 4               # W  taps
    conv_bias: bool = True
    conv_act: str = "silu"      # behind the conv; or none
    dt_bias: bool = True
    dt_least: float = 0.0       # the time step is held above this
    dt_most: float = 0.0        # and below this; 0: no limit
    skip_by: str = "head"       # Mamba-2's skip: a number for each head, or each channel
    norm_first: bool = False    # Mamba-2: norm before the gate
    norm_group: int = 0         # channels that Mamba-2's norm takes together; 0: those of a group of heads
    chunk: int = 64             # L
    norm_eps: float = 1e-5
    tied: bool = False          # the head's table is the embedding's
    dropout: float = 0.0        # of embedding, attention and residual branches alike
    cut: bool = False           # leave the mixer out (attention, or the scan without the conv): the control of an experiment
    norm: str = "rms"           # or layer: LayerNorm, with a bias
    mlp: str = "swiglu"         # or gelu, gelu_tanh: one matrix up in place of gate and up
    attention_bias: str = "none"        # or qkv, all: that of the output too
    mlp_bias: bool = False
    qk_norm: bool = False       # RMS norm of each head's query and key, before they are turned
    window: int = 0             # how many tokens a token sees, itself among them; 0: all
    positions: str = "rope"     # or learned, none
    longest: int = 256          # X: learned positions
    rope_pairs: str = "interleaved"     # or halves: which features are turned together
    rope_scaling: str = "none"  # or linear, ntk, llama3: how a longer text is fitted into the angles of a shorter one
    rope_factor: float = 1.0    # how much longer
    rope_original: int = 8192   # llama3: the shorter one's length; pairs that turn more than rope_high times in it stay as they
    rope_low: float = 1.0       # are, those that turn less than rope_low times are slowed by the whole factor
    rope_high: float = 4.0
    softcap: float = 0.0        # logits become softcap * tanh(logits / softcap); 0: they stay
    smoothing: float = 0.0      # share of each target that is spread evenly over the vocabulary
    z_loss: float = 0.0         # weight of the squared log of softmax's denominator in the loss

    def __post_init__(self):
        _require_counts("model", self, "blocks", "vocab", "width", "heads", "kv_heads", "head_width", "ffn", "ssm_heads",
                        "ssm_head_width", "groups", "state", "inner", "dt_rank", "conv", "chunk", "longest", "rope_original")
        for layer in self.pattern:
            _require(layer in ("attention", "mlp", "mamba1", "mamba2"),
                     f"model: pattern has {layer!r}, and a layer is attention, mlp, mamba1 or mamba2")
        _require(len(self.pattern) > 0, "model: pattern is empty, and a block needs at least one layer")
        _require(isinstance(self.padded_vocab, int) and (self.padded_vocab == 0 or self.padded_vocab >= self.vocab),
                 f"model: padded_vocab={self.padded_vocab} must be at least vocab={self.vocab}, or 0")
        _require(self.heads % self.kv_heads == 0,
                 f"model: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        _require(self.head_width % 2 == 0 or self.positions != "rope",
                 f"model: head_width={self.head_width} must be even, for rotary position embedding")
        _require(self.ssm_heads % self.groups == 0,
                 f"model: ssm_heads={self.ssm_heads} must be a multiple of groups={self.groups}")
        for name, words in _WORDS.items():
            _require(getattr(self, name) in words, f"model: {name}={getattr(self, name)} must be {' or '.join(words)}")
        _require(isinstance(self.window, int) and self.window >= 0,
                 f"model: window={self.window} must be a whole number, or 0 for none")
        for name in ("dropout", "smoothing"):
            _require(0 <= getattr(self, name) < 1, f"model: {name}={getattr(self, name)} must be at least 0 and below 1")
        for name in ("softcap", "z_loss"):
            _require(0 <= getattr(self, name) < float("inf"), f"model: {name}={getattr(self, name)} must be at least 0, and finite")
        _require(1 <= self.rope_factor < float("inf"), f"model: rope_factor={self.rope_factor} must be at least 1, and finite")
        _require(0 < self.rope_low < self.rope_high,
                 f"model: rope_low={self.rope_low} must be above 0 and below rope_high={self.rope_high}")
        _require(self.rope_scaling != "ntk" or self.head_width > 2,
                 f"model: head_width={self.head_width} must be above 2 for rope_scaling=ntk, which leaves its first pair as it is")
        channels = self.ssm_heads * self.ssm_head_width
        _require(isinstance(self.norm_group, int) and self.norm_group >= 0 and channels % (self.norm_group or channels) == 0,
                 f"model: norm_group={self.norm_group} must divide the {channels} channels of ssm_heads * ssm_head_width, or be 0")
        _require(self.dt_least >= 0 <= self.dt_most and (self.dt_most == 0 or self.dt_least < self.dt_most),
                 f"model: dt_least={self.dt_least} must be at least 0 and below dt_most={self.dt_most}, where that is not 0")
        _require(self.norm_eps > 0, f"model: norm_eps={self.norm_eps} must be above 0")
        _require(self.rope_base > 1, f"model: rope_base={self.rope_base} must be above 1")
        for name, value in vars(self).items():
            _require(not isinstance(value, float) or math.isfinite(value), f"model: {name}={value} must be finite")
        layers = self.blocks * len(self.pattern)
        _require(layers <= LAYERS, f"model: blocks={self.blocks} have {layers} layers, and at most {LAYERS} are taken")
        _require(self.numbers <= PARAMETERS, f"model: its matrices have {self.numbers:,} parameters, and at most {PARAMETERS:,} are taken")

    @property
    def sizes(self) -> dict[str, int]:
        """Letter -> size, for the dims of parameters and the shape comments of the code."""
        return {"V": self.padded_vocab or self.vocab, "X": self.longest, "D": self.width, "H": self.heads, "K": self.kv_heads,
                "E": self.head_width, "F": self.ffn, "M": self.ssm_heads, "P": self.ssm_head_width, "G": self.groups,
                "N": self.state, "I": self.inner, "R": self.dt_rank, "W": self.conv}

    @property
    def numbers(self) -> int:
        """How many parameters the matrices and conv filters have; the vectors are few beside them."""
        heads, channels, shared = self.heads * self.head_width, self.ssm_heads * self.ssm_head_width, self.groups * self.state
        inside = {"attention": 2 * self.width * (heads + self.kv_heads * self.head_width),
                  "mlp": self.width * self.ffn * (3 if self.mlp == "swiglu" else 2),
                  "mamba1": self.inner * (3 * self.width + 2 * self.dt_rank + 3 * self.state + self.conv),
                  "mamba2": self.width * (3 * channels + self.ssm_heads) + (2 * self.width + 2 * self.conv) * shared + self.conv * channels}
        tables = self.sizes["V"] * (1 if self.tied else 2) + (self.longest if self.positions == "learned" else 0)
        return self.width * tables + self.blocks * sum(inside[layer] for layer in self.pattern)

    @property
    def norm_width(self) -> int:
        """Channels that Mamba-2's norm takes together."""
        return self.norm_group or self.ssm_heads // self.groups * self.ssm_head_width

    @property
    def reach(self) -> int:
        """How many tokens, itself among them, a token sees at most: the window, or where there is none more than any text has."""
        return self.window or sys.maxsize

    def require_positions(self, count: int, what: str):
        """ValueError where the model has learned fewer positions than `what` has."""
        _require(self.positions != "learned" or count <= self.longest,
                 f"model: longest={self.longest} learned positions are too few for {what}, which has {count}")

    def dim(self, word: str) -> tuple[int, int]:
        """A dim of a parameter, "D", "HE" or "F/tp" -> (size, unit): the product of its letters, cut in whole first letters."""
        letters = word.split("/")[0]
        if letters.isdigit():
            return int(letters), 1
        size = 1
        for letter in letters:
            size *= self.sizes[letter]
        return size, size // self.sizes[letters[0]]

    def shape(self, dims: str) -> tuple[int, ...]:
        """"D HE/tp" -> the whole parameter's shape."""
        return tuple(self.dim(word)[0] for word in dims.split())

    def families(self, word: str) -> int:
        """How many units of a dim belong together: the groups that heads share (K of attention's, G of Mamba-2's); else each alone."""
        size, unit = self.dim(word)
        return {"H": self.kv_heads, "K": self.kv_heads, "M": self.groups, "G": self.groups}.get(word[0], size // unit)

    def part(self, word: str, ranks: int, rank: int) -> slice:
        """The part of a dim that rank holds: whole groups of heads, or, where there are more ranks than groups, a share of one.

        Then the ranks are cut into one run for each group.  The run's ranks hold the group's own units (K, G) each, and share its
        heads (H, M): some may be left without any.
        """
        size, unit = self.dim(word)
        groups = self.families(word)
        members = size // unit // groups * unit                                 # of one group, in elements
        if groups >= ranks or word[0] not in "HKMG":
            mine = share(groups, ranks, rank)
            return slice(mine.start * members, mine.stop * members)
        group, run = run_of(groups, ranks, rank)
        inside = share(members, len(run), rank - run.start, unit) if word[0] in "HM" else slice(0, members)
        return slice(group * members + inside.start, group * members + inside.stop)


# Options of the command line -> fields of Layout: how its cuts are filled.
FILLINGS = {"sp": "sp", "cp": "cp_attention", "cp-mamba": "cp_mamba", "tp-ring": "tp_ring", "node": "node", "schedule": "schedule",
            "virtual-stages": "virtual_stages", "slices": "slices", "by-cost": "stages_by_cost", "recompute": "recompute"}
CP_ATTENTION = ("ring", "zigzag", "striped", "gather", "ulysses", "ulysses+ring")
CP_MAMBA = ("gather", "chain", "scan", "heads")
SCHEDULES = ("1f1b", "gpipe", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "sliced")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """How many ranks on each axis of the mesh, and which axis is outermost.  Written `dp=2,tp=2`.  And what each cut is filled with."""
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES
    sp: bool = False                    # sequence parallelism: outside the layers, tp cuts the sequence
    cp_attention: str = "ring"          # how attention meets the tokens of other ranks, and which tokens a rank has
    cp_mamba: str = "gather"            # how conv and scan do
    tp_ring: bool = False               # with sp: gather and multiply, multiply and scatter, in steps of a ring
    node: int = 0                       # ranks of a node, in a row; 0: all stand on one
    schedule: str = "1f1b"              # the order in which stages of pp work
    virtual_stages: int = 0             # of each rank, where the schedule has a choice; 0: as it likes
    slices: int = 0                     # of the sequence, of the schedule sliced; 0: as it likes
    stages_by_cost: bool = False        # stages of equal cost, not of as many layers
    recompute: str = "none"             # what backward computes again; or the kinds of layers that are, such as mlp+mamba1

    def __post_init__(self):
        _require_counts("mesh", self, *AXES)
        _require(sorted(self.order) == sorted(AXES),
                 f"mesh: order {','.join(self.order)} must name each of {', '.join(AXES)} once")
        _require(self.cp_attention in CP_ATTENTION, f"mesh: cp {self.cp_attention!r} must be {' or '.join(CP_ATTENTION)}")
        _require(self.cp_mamba in CP_MAMBA, f"mesh: cp-mamba {self.cp_mamba!r} must be {' or '.join(CP_MAMBA)}")
        _require(self.schedule in SCHEDULES, f"mesh: schedule {self.schedule!r} must be {' or '.join(SCHEDULES)}")
        _require(self.recompute in RECOMPUTE or set(self.recompute.split("+")) <= {"attention", "mlp", "mamba1", "mamba2"},
                 f"mesh: recompute {self.recompute!r} must be {' or '.join(RECOMPUTE)}, or kinds of layers, such as mlp+mamba1")
        for name in ("virtual_stages", "slices"):
            size = getattr(self, name)
            _require(isinstance(size, int) and size >= 0, f"mesh: {name}={size} must be a whole number, or 0")
        _require(self.schedule != "sliced" or self.cp == 1 or not self.cp_attention.startswith("ulysses"),
                 f"mesh: schedule sliced hands on keys by tokens, and cp {self.cp_attention} has them by heads: take ring or gather")
        _require(self.sp or not self.tp_ring, "mesh: tp-ring is a form of sequence parallelism, and needs sp")
        _require(isinstance(self.node, int) and self.node >= 0, f"mesh: node={self.node} must be a whole number of ranks, or 0")
        _require(self.ranks <= RANKS, f"mesh: {self} has {self.ranks} ranks, and at most {RANKS} are taken")

    def computes_again(self, kind: str) -> bool:
        """Is a whole layer of this kind computed again in backward?"""
        return self.recompute == "full" or kind in self.recompute.split("+")

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.cp * self.tp

    @classmethod
    def parse(cls, text: str, order: str | None = None) -> Layout:
        """"dp=2,tp=2" -> Layout; axes left out have size 1."""
        sizes = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            axis, _, size = part.partition("=")
            _require(axis in AXES, f"mesh: {axis!r} in {text!r} is no axis; the axes are {', '.join(AXES)}")
            _require(axis not in sizes, f"mesh: {axis} stands twice in {text!r}")
            _require(size.isascii() and size.isdigit() and int(size) > 0,
                     f"mesh: {axis}={size} in {text!r} must be a whole number of at least 1")
            sizes[axis] = int(size)
        return cls(**sizes, order=tuple(order.split(",")) if order else AXES)

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "dp=1"


@dataclass(frozen=True)
class Training:
    """How to train: the batch of one step, the optimizer, and the schedule of its rate."""
    steps: int = 300
    rows: int = 16              # sequences in a step, over all ranks
    sequence: int = 256         # S
    micro_batches: int = 1      # into which each rank cuts its rows
    optimizer: str = "adamw"    # or sgd
    rate: float = 3e-3
    warmup: int = 20            # steps of rising rate; then a cosine down to a tenth
    decay: float = 0.1          # weight decay, of parameters of two dims or more
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0           # largest global norm of the gradient; 0 clips nothing
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self):
        _require_counts("training", self, "steps", "rows", "sequence", "micro_batches")
        for name, most in (("rows", ROWS), ("sequence", SEQUENCE), ("micro_batches", MICRO_BATCHES)):
            _require(getattr(self, name) <= most, f"training: {name}={getattr(self, name)} must be at most {most}")
        tokens = self.rows * self.sequence
        _require(tokens <= TOKENS,
                 f"training: rows={self.rows} of sequence={self.sequence} are {tokens} tokens a step, and at most {TOKENS} are taken")
        _require(self.optimizer in ("adamw", "sgd"), f"training: optimizer {self.optimizer!r} must be adamw or sgd")
        _require(self.dtype in ("float32", "float64"), f"training: dtype {self.dtype!r} must be float32 or float64")
        for name in ("rate", "warmup", "decay", "clip"):
            _require(getattr(self, name) >= 0, f"training: {name}={getattr(self, name)} must not be negative")
        _require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
                 f"training: beta1={self.beta1} and beta2={self.beta2} must be at least 0 and below 1")


_GPT2 = dict(norm="layer", positions="learned", attention_bias="all", mlp_bias=True, mlp="gelu_tanh", tied=True)
_EVEN = dict(width=64, heads=8, kv_heads=2, head_width=8, ffn=128, ssm_heads=8, ssm_head_width=16, groups=2, state=16, chunk=16,
             inner=128, dt_rank=4)
_ODD = dict(width=33, heads=6, kv_heads=3, head_width=10, ffn=71, ssm_heads=9, ssm_head_width=7, groups=3, state=5, chunk=7,
            inner=47, dt_rank=3, vocab=259)

_HYBRID = ("mamba2", "attention", "mamba1", "mlp")

PRESETS: dict[str, Model] = {
    "llama": Model(blocks=4, width=128, heads=4, kv_heads=2, head_width=32, ffn=384),
    "mamba2": Model(pattern=("mamba2",), blocks=2, width=128, ssm_heads=8, ssm_head_width=32, groups=2, state=64, conv=2),
    "gpt2": Model(blocks=4, width=128, heads=4, kv_heads=4, head_width=32, ffn=512, longest=64, **_GPT2),
    "llama-tiny": Model(blocks=4, **_EVEN),                                     # 4 blocks of 2 = 8 layers
    "mamba2-tiny": Model(pattern=("mamba2",), blocks=8, **_EVEN),
    "gpt2-tiny": Model(blocks=4, **_EVEN | dict(kv_heads=8), **_GPT2),
    "llama-uneven": Model(blocks=3, **_ODD),                                    # divisible by nothing
    "mamba2-uneven": Model(pattern=("mamba2",), blocks=5, **_ODD),
    "gpt2-uneven": Model(blocks=3, **_ODD | dict(kv_heads=6, longest=67), **_GPT2),
    "mamba1": Model(pattern=("mamba1",), blocks=4, width=128, inner=256, dt_rank=8, state=16),
    "mamba1-tiny": Model(pattern=("mamba1",), blocks=8, **_EVEN),
    "mamba1-uneven": Model(pattern=("mamba1",), blocks=5, **_ODD),
    "hybrid-tiny": Model(pattern=_HYBRID, blocks=2, **_EVEN),
    "hybrid-uneven": Model(pattern=_HYBRID, blocks=1, **_ODD),
}

# The families that `verify` walks where none is named: each has presets NAME-tiny and NAME-uneven.
FAMILIES = ("llama", "gpt2", "mamba1", "mamba2", "hybrid")

# How the presets that are made to learn are trained; a whole run on 2 cores, control included, takes minutes.
TRAININGS: dict[str, Training] = {
    "llama": Training(steps=700, rows=4, sequence=256, rate=3e-3),
    "mamba2": Training(steps=800, rows=4, sequence=256, rate=3e-3),
    "gpt2": Training(steps=900, rows=16, sequence=64, rate=3e-3),       # each learned position is seen in every row: short rows
    "mamba1": Training(steps=450, rows=4, sequence=256, rate=3e-3),
}
