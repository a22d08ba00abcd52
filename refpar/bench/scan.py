"""bench scan: Mamba's scans alone, forward and backward: refpar's forms beside a loop over tokens in PyTorch, and Hugging Face's
scan of Mamba-2.

refpar's recurrence is the meaning, and slow; the form in chunks is the one that models use.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar.bench import rivals
from refpar.bench.alternate import alternate, medians
from refpar.nn import selective, ssd
from refpar.oracle import naive

ROUNDS = 7


class Case(NamedTuple):
    """Mamba-1: channels and their state, heads = 0.  Mamba-2: heads of 64 channels, one group, and the state."""
    rows: int
    tokens: int
    channels: int
    state: int
    heads: int = 0
    chunk: int = 64


CASES: dict[str, Case] = {
    "mamba1-64": Case(8, 128, 64, 16),
    "mamba1-256": Case(1, 1024, 256, 16),
    "mamba1-512": Case(4, 256, 512, 16),
    "mamba2-8": Case(4, 256, 512, 64, heads=8),
    "mamba2-8-n128": Case(4, 256, 512, 128, heads=8),
    "mamba2-16-long": Case(1, 1024, 1024, 128, heads=16),
}
DEFAULT = ("mamba1-64", "mamba1-512", "mamba2-8")


def drawn(case: Case) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """x, dt, B, C and A_log of one layer, and the gradient of y, float32; time steps between 1/1000 and 1/10."""
    rng = np.random.default_rng(0)
    tokens = (case.rows, case.tokens)
    if case.heads:
        x, dt, B, A = (case.heads, case.channels // case.heads), (case.heads,), (1, case.state), (case.heads,)
    else:
        x, dt, B, A = (case.channels,), (case.channels,), (case.state,), (case.channels, case.state)
    shapes = {"x": (*tokens, *x), "dt": (*tokens, *dt), "B": (*tokens, *B), "C": (*tokens, *B), "A_log": A}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["dt"] = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shapes["dt"])).astype(np.float32)
    return arrays, rng.standard_normal(shapes["x"]).astype(np.float32)


def ours(case: Case, arrays: dict[str, np.ndarray], dy) -> dict[str, Callable]:
    """refpar's forms; each returns y."""
    position = np.broadcast_to(np.arange(case.tokens), dy.shape[:2])
    if case.heads:
        before = np.zeros((case.rows, *dy.shape[2:], case.state), np.float32)
        forms = {"recurrence": (naive.scan_forward, naive.scan_backward, ()),
                 "refpar": (ssd.ssd_forward, ssd.ssd_backward, (case.chunk,))}
    else:
        before = np.zeros((case.rows, case.state, case.channels), np.float32)
        forms = {"recurrence": (naive.selective_forward, naive.selective_backward, ()),
                 "refpar": (selective.chunked_forward, selective.chunked_backward, ())}

    def both(forward, backward, more) -> Callable:
        def run():
            y, after, saved = forward(*arrays.values(), position, before, *more)
            backward(dy, np.zeros_like(after), saved, arrays["A_log"], position, *more)
            return y
        return run
    return {name: both(*form) for name, form in forms.items()}


def theirs(case: Case, arrays: dict[str, np.ndarray], dy) -> dict[str, Callable]:
    """The loop, and Hugging Face's chunks; each returns y."""
    torch, _ = rivals.need_torch()
    leaf = {name: torch.tensor(array, requires_grad=True) for name, array in arrays.items()}
    dy = torch.tensor(dy)

    def both(scanned: Callable) -> Callable:
        def run():
            for tensor in leaf.values():
                tensor.grad = None
            y = scanned(leaf["x"], leaf["dt"], -leaf["A_log"].exp(), leaf["B"], leaf["C"])
            y.backward(dy)
            return y.detach().numpy()
        return run
    if not case.heads:
        loop = rivals.selective_scan(torch)
        return {"loop": both(lambda x, dt, A, B, C: loop(x.mT, dt.mT, A, B.mT, C.mT).mT)}
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    return {"loop": both(rivals.ssd_loop(torch)),
            "hf": both(lambda x, dt, A, B, C: mamba2_chunk_scan(x, dt, A, B, C, chunk_size=case.chunk))}


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds by name."""
    arrays, dy = drawn(case)
    runs = ours(case, arrays, dy) | theirs(case, arrays, dy)
    expected = runs["recurrence"]()
    for name, run in runs.items():
        if not np.allclose(run(), expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max()):
            raise RuntimeError(f"{name} has another result than the recurrence: they do not compute the same")
    return medians(alternate(runs, rounds))


def prepare(args) -> Callable:
    """Refuse unknown cases and missing packages -> what measures them."""
    names = rivals.named(args.cases, CASES, DEFAULT)
    return lambda world: run(world, names, args.rounds or ROUNDS)


def run(world, names: tuple[str, ...], rounds: int) -> int:
    """Print the table; one process measures."""
    if not world.main:
        return 0
    print(f"a scan, forward and backward, float32, one thread, ms of CPU time, median of {rounds} rounds in turn\n")
    print(f"{'':18}{'refpar':>10}{'recurrence':>12}{'loop':>10}{'hf':>10}{'refpar/loop':>14}{'refpar/hf':>12}")
    for name in names:
        seconds = measure(CASES[name], rounds)
        shown = "".join(f"{seconds[who] * 1e3:{width}.1f}" if who in seconds else f"{'':{width}}"
                        for who, width in (("refpar", 10), ("recurrence", 12), ("loop", 10), ("hf", 10)))
        ratios = [f"{seconds['refpar'] / seconds[rival]:.2f}" if rival in seconds else "" for rival in ("loop", "hf")]
        print(f"{name:18}{shown}{ratios[0]:>14}{ratios[1]:>12}", flush=True)
    return 0
