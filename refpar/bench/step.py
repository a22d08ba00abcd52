"""bench step: one training step, forward and backward without the optimizer, beside PyTorch and Hugging Face.

All have the same weights and the same batch, and must have the same loss.  `peak` is how much of one core's matrix-product rate
refpar reaches: the products that mathematics needs (none that are recomputed, none of what the causal mask hides) in the
time that the step takes, over the rate of one product of 1024 by 1024 matrices, measured in the same rounds.
"""
from __future__ import annotations

import math
from typing import Callable, NamedTuple

import numpy as np

from refpar.bench import rivals
from refpar.bench.alternate import alternate, medians
from refpar.config import Model
from refpar.corpus import Batch
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients
from refpar.nn.init import initial

ROUNDS = 7
PEAK = 1024                     # rows and columns of the product that measures the peak


class Case(NamedTuple):
    """A model and the batch of its step."""
    model: Model
    rows: int = 4
    sequence: int = 256
    dtype: str = "float32"


def _llama(width: int, heads: int = 8, kv_heads: int = 8, vocab: int = 256) -> Model:
    return Model(blocks=4, width=width, heads=heads, kv_heads=kv_heads, head_width=width // heads, vocab=vocab,
                 ffn=math.ceil(width * 8 / 3 / 32) * 32)


def _gpt2(width: int, heads: int = 8) -> Model:
    return Model(blocks=4, width=width, heads=heads, kv_heads=heads, head_width=width // heads, ffn=4 * width, norm="layer",
                 positions="learned", attention_bias="all", mlp_bias=True, mlp="gelu_tanh", tied=True)


def _mamba1(width: int, vocab: int = 256) -> Model:
    return Model(pattern=("mamba1",), blocks=4, width=width, inner=2 * width, dt_rank=width // 16, vocab=vocab)


def _mamba2(width: int, state: int, vocab: int = 256) -> Model:
    return Model(pattern=("mamba2",), blocks=4, width=width, ssm_heads=width // 32, ssm_head_width=64, groups=1, state=state,
                 vocab=vocab)


CASES: dict[str, Case] = {
    "llama-64": Case(_llama(64, 4, 4)),
    "llama-128": Case(_llama(128, 4, 4)),
    "llama-256": Case(_llama(256)),
    "llama-256-v8192": Case(_llama(256, vocab=8192)),
    "llama-256-gqa": Case(_llama(256, 8, 2)),
    "llama-512": Case(_llama(512)),
    "llama-512-v8192": Case(_llama(512, vocab=8192)),
    "llama-256-long": Case(_llama(256), rows=1, sequence=1024),
    "llama-128-short": Case(_llama(128, 4, 4), rows=16, sequence=64),
    "llama-64-f64": Case(_llama(64, 4, 4), dtype="float64"),
    "llama-128-f64": Case(_llama(128, 4, 4), dtype="float64"),
    "llama-256-f64": Case(_llama(256), dtype="float64"),
    "gpt2-128": Case(_gpt2(128, 4)),
    "gpt2-256": Case(_gpt2(256)),
    "mamba1-128": Case(_mamba1(128)),
    "mamba1-256": Case(_mamba1(256)),
    "mamba1-256-v8192": Case(_mamba1(256, vocab=8192)),
    "mamba2-256": Case(_mamba2(256, 64)),
    "mamba2-256-v8192": Case(_mamba2(256, 128, vocab=8192)),
    "mamba2-512-v8192": Case(_mamba2(512, 64, vocab=8192)),
}
DEFAULT = ("llama-64", "llama-128", "llama-256", "llama-128-f64", "mamba1-128", "mamba2-256")       # under a minute


def drawn(case: Case) -> tuple[dict, Batch]:
    """Initial weights, and a batch of random tokens, each row one document."""
    tokens = np.random.default_rng(0).integers(0, case.model.vocab, (case.rows, case.sequence + 1))
    place = np.arange(case.rows * case.sequence).reshape(case.rows, case.sequence)
    batch = Batch(tokens[:, :case.sequence], tokens[:, 1:], place % case.sequence, place // case.sequence, place)
    return initial(case.model, build(case.model), 0, np.dtype(case.dtype)), batch


def contestants(case: Case) -> dict[str, Callable]:
    """Name -> one step, which returns the mean loss."""
    params, batch = drawn(case)
    chain, count = build(case.model), batch.count

    def refpar() -> float:
        return loss_and_gradients(chain, params, batch, count)[0] / count
    steps = {"refpar": refpar}
    if case.model.mlp == "swiglu" and case.model.pattern == ("attention", "mlp"):
        steps["torch"] = rivals.plain_llama(case.model, params, batch)
    return steps | {"hf": rivals.hugging_face(case.model, params, batch)}


def useful(case: Case) -> int:
    """Floating-point operations of the step's matrix products, as mathematics needs them; 0 where a scan is part of it."""
    model, tokens = case.model, case.rows * case.sequence
    if model.pattern != ("attention", "mlp"):
        return 0
    weights = sum(math.prod(model.shape(dims)) for layer, group in build(model).dims().items() for name, dims in group.items()
                  if layer != "0.embedding" and len(dims.split()) > 1)
    weights += model.vocab * model.width * model.tied
    pairs = case.rows * case.sequence * (case.sequence + 1) // 2
    return 6 * tokens * weights + 12 * pairs * model.heads * model.head_width * model.blocks


def measure(case: Case, rounds: int) -> tuple[dict[str, float], float | None]:
    """Median seconds by name, and refpar's fraction of the peak."""
    steps = contestants(case)
    losses = {name: step() for name, step in steps.items()}
    for name, loss in losses.items():
        if abs(loss - losses["refpar"]) > 1e-4:
            raise RuntimeError(f"{name} has loss {loss:.6f} and refpar {losses['refpar']:.6f}: they do not compute the same")
    square = np.ones((PEAK, PEAK), case.dtype)
    seconds = alternate(steps | {"peak": lambda: square @ square}, rounds)
    rate = 2 * PEAK**3 / min(seconds.pop("peak"))
    result, flops = medians(seconds), useful(case)
    return result, flops / result["refpar"] / rate if flops else None


def prepare(args) -> Callable:
    """Refuse unknown cases and missing packages -> what measures them."""
    names = rivals.named(args.cases, CASES, DEFAULT)
    return lambda world: run(world, names, args.rounds or ROUNDS)


def run(world, names: tuple[str, ...], rounds: int) -> int:
    """Print the table; one process measures."""
    if not world.main:
        return 0
    print(f"a training step, forward and backward, one thread, ms of CPU time, median of {rounds} rounds in turn\n")
    print(f"{'':18}{'refpar':>10}{'torch':>10}{'hf':>10}{'refpar/torch':>15}{'refpar/hf':>12}{'peak':>8}")
    for name in names:
        seconds, peak = measure(CASES[name], rounds)
        ratios = [f"{seconds['refpar'] / seconds[rival]:.2f}" if rival in seconds else "" for rival in ("torch", "hf")]
        shown = "".join(f"{seconds[who] * 1e3:10.1f}" if who in seconds else f"{'':10}" for who in ("refpar", "torch", "hf"))
        print(f"{name:18}{shown}{ratios[0]:>15}{ratios[1]:>12}{f'{peak:.2f}' if peak else '':>8}", flush=True)
    return 0
