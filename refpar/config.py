"""What a run is: sizes of a model, a layout of ranks, and how to train.  Frozen, and checked at birth.

A wrong size is refused here, in one sentence with its numbers, before a message is sent or a file written.
Sizes that follow from others are properties.  The letters are those of the glossary in `refpar/__init__.py`.
"""
from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

AXES = ("dp", "pp", "cp", "tp")          # outermost first: the survey's rank order (section 4.2, figures 4 and 5)


def share(size: int, n: int, i: int, unit: int = 1) -> slice:
    """Shard i of n of a dim: size*i//n to size*(i+1)//n, counted in whole units (a head, a group).

    Any size works, n larger than size too: then some shards are empty.
    """
    units = size // unit
    return slice(units * i // n * unit, units * (i + 1) // n * unit)


def shares(size: int, n: int, unit: int = 1) -> list[int]:
    """The lengths of all n shards of a dim."""
    return [part.stop - part.start for part in (share(size, n, i, unit) for i in range(n))]


def _require(holds: bool, sentence: str):
    if not holds:
        raise ValueError(sentence)


@dataclass(frozen=True)
class Model:
    """The sizes of one model.  `pattern` is the mixers and MLPs of one block, repeated `blocks` times."""
    pattern: tuple[str, ...] = ("attention", "mlp")
    blocks: int = 4
    vocab: int = 256            # V: bytes
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
    conv: int = 4               # W  taps
    chunk: int = 64             # L
    norm_eps: float = 1e-5
    tied: bool = False          # the head's table is the embedding's
    dropout: float = 0.0        # of embedding, attention and residual branches alike
    cut: bool = False           # leave the mixer out (attention, or the scan without the conv): the control of an experiment

    def __post_init__(self):
        for name in ("blocks", "vocab", "width", "heads", "kv_heads", "head_width", "ffn", "ssm_heads", "ssm_head_width",
                     "groups", "state", "conv", "chunk"):
            size = getattr(self, name)
            _require(isinstance(size, int) and size >= 1, f"model: {name}={size} must be a whole number of at least 1")
        for layer in self.pattern:
            _require(layer in ("attention", "mlp", "mamba2"),
                     f"model: pattern has {layer!r}, and a layer is attention, mlp or mamba2")
        _require(len(self.pattern) > 0, "model: pattern is empty, and a block needs at least one layer")
        _require(self.heads % self.kv_heads == 0,
                 f"model: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        _require(self.head_width % 2 == 0, f"model: head_width={self.head_width} must be even, for rotary position embedding")
        _require(self.ssm_heads % self.groups == 0,
                 f"model: ssm_heads={self.ssm_heads} must be a multiple of groups={self.groups}")
        _require(0 <= self.dropout < 1, f"model: dropout={self.dropout} must be at least 0 and below 1")
        _require(self.norm_eps > 0, f"model: norm_eps={self.norm_eps} must be above 0")
        _require(self.rope_base > 1, f"model: rope_base={self.rope_base} must be above 1")

    @property
    def sizes(self) -> dict[str, int]:
        """Letter -> size, for the dims of parameters and the shape comments of the code."""
        return {"V": self.vocab, "D": self.width, "H": self.heads, "K": self.kv_heads, "E": self.head_width, "F": self.ffn,
                "M": self.ssm_heads, "P": self.ssm_head_width, "G": self.groups, "N": self.state, "W": self.conv}

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


@dataclass(frozen=True)
class Layout:
    """How many ranks on each axis of the mesh, and which axis is outermost.  Written `dp=2,tp=2`."""
    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self):
        for axis in AXES:
            size = getattr(self, axis)
            _require(isinstance(size, int) and size >= 1, f"mesh: {axis}={size} must be a whole number of at least 1")
        _require(sorted(self.order) == sorted(AXES),
                 f"mesh: order {','.join(self.order)} must name each of {', '.join(AXES)} once")

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
            _require(size.isdigit() and int(size) > 0, f"mesh: {axis}={size} in {text!r} must be a whole number of at least 1")
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
        for name in ("steps", "rows", "sequence", "micro_batches"):
            size = getattr(self, name)
            _require(isinstance(size, int) and size >= 1, f"training: {name}={size} must be a whole number of at least 1")
        _require(self.optimizer in ("adamw", "sgd"), f"training: optimizer {self.optimizer!r} must be adamw or sgd")
        _require(self.dtype in ("float32", "float64"), f"training: dtype {self.dtype!r} must be float32 or float64")
        for name in ("rate", "warmup", "decay", "clip"):
            _require(getattr(self, name) >= 0, f"training: {name}={getattr(self, name)} must not be negative")
        _require(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
                 f"training: beta1={self.beta1} and beta2={self.beta2} must be at least 0 and below 1")


_EVEN = dict(width=64, heads=8, kv_heads=2, head_width=8, ffn=128, ssm_heads=8, ssm_head_width=16, groups=2, state=16, chunk=16)
_ODD = dict(width=33, heads=6, kv_heads=3, head_width=10, ffn=71, ssm_heads=9, ssm_head_width=7, groups=3, state=5, chunk=7,
            vocab=259)

PRESETS: dict[str, Model] = {
    "llama": Model(blocks=4, width=128, heads=4, kv_heads=2, head_width=32, ffn=384),
    "mamba2": Model(pattern=("mamba2",), blocks=2, width=128, ssm_heads=8, ssm_head_width=32, groups=2, state=64, conv=2),
    "llama-tiny": Model(blocks=4, **_EVEN),                                     # 4 blocks of 2 = 8 layers
    "mamba2-tiny": Model(pattern=("mamba2",), blocks=8, **_EVEN),
    "llama-uneven": Model(blocks=3, **_ODD),                                    # divisible by nothing
    "mamba2-uneven": Model(pattern=("mamba2",), blocks=5, **_ODD),
}

# How the presets that are made to learn are trained; a whole run on 2 cores, control included, takes minutes.
TRAININGS: dict[str, Training] = {
    "llama": Training(steps=700, rows=4, sequence=256, rate=3e-3),
    "mamba2": Training(steps=800, rows=4, sequence=256, rate=3e-3),
}


def _field(name: str, text):
    """One `field=value` of a model, turned into the type that the field has."""
    known = {field.name: field.default for field in dataclasses.fields(Model)}
    _require(name in known, f"model: there is no field {name!r}; the fields are {', '.join(known)}")
    kind = type(known[name])
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[str(text).lower()]
        if kind is tuple:
            return tuple(text.replace("+", " ").split()) if isinstance(text, str) else tuple(text)
        if kind is int and float(text) != int(text):
            raise ValueError
        return kind(text)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"model: {name}={text} must be of the type {kind.__name__}, such as {known[name]}") from None


def parse_model(text: str) -> Model:
    """`NAME[,field=value...]` or `FILE.json` (its fields, with an optional "base" preset) -> Model."""
    name, *changes = text.split(",")
    if name.endswith(".json"):
        try:
            fields = json.loads(Path(name).read_text())
        except OSError:
            raise ValueError(f"model: the file {name} cannot be read") from None
        except ValueError as error:
            raise ValueError(f"model: the file {name} is not JSON ({error})") from None
        _require(isinstance(fields, dict), f"model: the file {name} must hold one JSON object of fields")
        name = fields.pop("base", None)
    else:
        fields = {}
    _require(name is None or name in PRESETS, f"model: there is no preset {name!r}; the presets are {', '.join(PRESETS)}")
    for change in changes:
        field, equals, value = change.partition("=")
        _require(bool(equals), f"model: {change!r} must be written field=value")
        fields[field] = value
    base = PRESETS[name] if name else Model()
    return dataclasses.replace(base, **{field: _field(field, value) for field, value in fields.items()})


def describe_model(model: Model) -> str:
    """The shortest `NAME,field=value...` that parses to this model."""
    def changes(base: Model) -> list[str]:
        told = {name: getattr(model, name) for name in vars(model) if getattr(model, name) != getattr(base, name)}
        return [f"{name}={'+'.join(value) if isinstance(value, tuple) else value}" for name, value in told.items()]
    return min((",".join([name, *changes(base)]) for name, base in PRESETS.items()), key=len)
