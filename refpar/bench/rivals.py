"""What refpar is measured beside: PyTorch and Hugging Face's classes, eager, on one thread.  Both are extras (`compare`).

A rival is given refpar's parameters and batch, and is a function that runs forward and backward once and returns the mean loss, so
that who computes something else is found out before anything is timed.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Callable

import numpy as np

from refpar.config import Model
from refpar.imports.convert import from_refpar
from refpar.imports.settings import fields_of


def need_torch():
    """torch on one thread, and transformers, quiet; or ValueError, one sentence."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ValueError(f"this compares with PyTorch and Hugging Face, and {error.name} is missing: "
                         "pip install refpar[compare]") from None
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    return torch, transformers


def named(given, cases: dict, default: tuple[str, ...]) -> tuple[str, ...]:
    """The cases to measure: those given, all, or a few; ValueError for an unknown one, or where there is nobody to compare with."""
    names = tuple(cases) if given == ("all",) else given or default
    for name in names:
        if name not in cases:
            raise ValueError(f"there is no case {name!r}; the cases are {', '.join(cases)}, or all")
    need_torch()
    return names


def step_of(torch, logits_of: Callable, weights: list, tokens, targets) -> Callable:
    """Forward, mean cross-entropy, backward."""
    tokens, targets = torch.tensor(tokens), torch.tensor(targets).flatten()

    def step() -> float:
        for weight in weights:
            weight.grad = None
        loss = torch.nn.functional.cross_entropy(logits_of(tokens).flatten(0, 1), targets, ignore_index=-1)
        loss.backward()
        return loss.item()
    return step


CLASSES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM"}


def hugging_face(config: Model, params: dict, batch) -> Callable:
    """The class itself, without dropout.  Attention is torch's scaled_dot_product_attention, and Mamba-1's scan the loop below."""
    torch, transformers = need_torch()
    fields = fields_of(config)
    build = getattr(transformers, CLASSES[fields.pop("model_type")])
    model = build(build.config_class(**fields)).eval()
    state = {name: torch.tensor(array) for name, array in from_refpar(params, config).items()}
    model = model.to(next(iter(state.values())).dtype)
    model.load_state_dict(state, strict=not config.tied)
    model.tie_weights()

    def logits_of(tokens):
        with unbound_scan(torch):
            return model(tokens, use_cache=False).logits
    return step_of(torch, logits_of, list(model.parameters()), batch.tokens, batch.targets)


@contextmanager
def unbound_scan(torch):
    """Within the block, Hugging Face's Mamba-1 takes its scan from here.  Its own indexes each token's decay, for which autograd
    fills a gradient as large as all of them for every token: quadratic in the sequence, and no measure of anything."""
    from transformers.models.mamba import modeling_mamba
    own, modeling_mamba.mamba_selective_scan = modeling_mamba.mamba_selective_scan, selective_scan(torch)
    try:
        yield
    finally:
        modeling_mamba.mamba_selective_scan = own


def selective_scan(torch) -> Callable:
    """Mamba-1's scan as an eager loop over tokens, which `unbind` takes apart at once."""
    F = torch.nn.functional

    def scan(x, dt, A, B, C, D=None, z=None, delta_bias=None, **options):
        """x, dt, z [B, I, S], A [I, N], B, C [B, N, S] -> y [B, I, S]."""
        dt = F.softplus(dt + delta_bias[:, None]) if delta_bias is not None else dt
        decay = torch.exp(dt.unsqueeze(-1) * A[:, None])                            # [B, I, S, N]
        enters = (dt * x).unsqueeze(-1) * B.transpose(1, 2).unsqueeze(1)
        state, ys = torch.zeros_like(enters[:, :, 0]), []
        for a, b, c in zip(decay.unbind(2), enters.unbind(2), C.unbind(2)):
            state = a * state + b
            ys.append((state @ c.unsqueeze(-1)).squeeze(-1))
        y = torch.stack(ys, dim=-1)
        y = y if D is None else y + x * D[:, None]
        return y if z is None else y * F.silu(z)
    return scan


def ssd_loop(torch) -> Callable:
    """Mamba-2's scan as such a loop."""
    def scan(x, dt, A, B, C):
        """x [B, S, M, P], dt [B, S, M], A [M], B, C [B, S, G, N] -> y [B, S, M, P]."""
        B, C = (u.repeat_interleave(x.shape[2] // u.shape[2], dim=2) for u in (B, C))       # [B, S, M, N]
        decay, enters = torch.exp(dt * A), x * dt.unsqueeze(-1)
        state, ys = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[3], dtype=x.dtype), []
        for a, u, b, c in zip(decay.unbind(1), enters.unbind(1), B.unbind(1), C.unbind(1)):
            state = a[..., None, None] * state + u.unsqueeze(-1) * b.unsqueeze(-2)
            ys.append((state @ c.unsqueeze(-1)).squeeze(-1))
        return torch.stack(ys, dim=1)
    return scan


def plain_llama(config: Model, params: dict, batch) -> Callable:
    """Llama in plain PyTorch, as one writes it to be fast: q, k and v in one product, gate and up in another, torch's RMS norm,
    rotary positions as one complex product, attention by scaled_dot_product_attention."""
    torch, _ = need_torch()
    F, heads, kv_heads, width = torch.nn.functional, config.heads, config.kv_heads, config.head_width
    weights = []

    def leaf(array):
        weights.append(torch.tensor(np.ascontiguousarray(array), requires_grad=True))
        return weights[-1]
    table = leaf(params["0.embedding"]["table"])
    blocks = []
    for i in range(1, 1 + 2 * config.blocks, 2):
        a, m = params[f"{i}.attention"], params[f"{i + 1}.mlp"]
        blocks.append([leaf(w) for w in (a["norm"], np.concatenate([a["q"], a["k"], a["v"]], axis=1).T, a["o"].T,
                                         m["norm"], np.concatenate(list(m["gate_up"]), axis=1).T, m["down"].T)])
    last = 1 + 2 * config.blocks
    norm, head = leaf(params[f"{last}.norm"]["norm"]), leaf(params[f"{last + 1}.head"]["head"].T)
    rows, length = batch.tokens.shape
    angles = np.arange(length)[:, None] * config.rope_base ** (-np.arange(0, width, 2) / width)
    turn = torch.tensor(np.exp(1j * angles).astype(np.result_type(table.detach().numpy().dtype, np.complex64)))[None, :, None]

    def turned(x):
        return torch.view_as_real(torch.view_as_complex(x.view(rows, length, x.shape[2], width // 2, 2)) * turn).flatten(3)

    def normed(x, w):
        return F.rms_norm(x, (config.width,), w, config.norm_eps)

    def logits_of(tokens):
        x = table[tokens]
        for norm_a, qkv, out, norm_m, gate_up, down in blocks:
            q, k, v = (part.unflatten(2, (n, width)) for n, part in zip(
                (heads, kv_heads, kv_heads), F.linear(normed(x, norm_a), qkv).split([heads * width, *[kv_heads * width] * 2], 2)))
            q, k, v = (part.transpose(1, 2) for part in (turned(q), turned(k), v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads > kv_heads)
            x = x + F.linear(seen.transpose(1, 2).flatten(2), out)
            gate, up = F.linear(normed(x, norm_m), gate_up).chunk(2, 2)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.linear(normed(x, norm), head)
    return step_of(torch, logits_of, weights, batch.tokens, batch.targets)
