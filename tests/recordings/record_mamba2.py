"""Records small Mamba-2 models run by PyTorch in float64: mamba2.npz, with which `test_recordings.py` compares ours.  One is as
published, the other has every option otherwise.

    python tests/recordings/record_mamba2.py            (needs torch)

Written from the papers' formulas, token by token, and independently of refpar: every document is run alone, so nothing here resets
anything; the conv is torch's, autograd differentiates, torch's AdamW steps.  Imports nothing of refpar.
"""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SIZES = dict(blocks=2, vocab=17, width=10, ssm_heads=6, ssm_head_width=3, groups=2, state=4, conv=3, norm_eps=1e-4)
OTHERWISE = dict(norm_first=True, norm_group=9, skip_by="channel", conv_act="none", conv_bias=False, dt_bias=False, dt_least=0.5,
                 dt_most=1.0)
STEPS, TRAINING = 3, dict(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=0.5)
ROWS = [[(3, 4), (0, 1), (0, 9)], [(0, 14)], [(7, 2), (0, 5), (0, 2), (0, 5)]]      # documents: first position, length


def drawn_weights(rng, options):
    """name -> array; nothing at its usual 1 or 0."""
    D, M, P, G, N, W = (SIZES[name] for name in ("width", "ssm_heads", "ssm_head_width", "groups", "state", "conv"))
    shapes = {"0.embedding.table": (SIZES["vocab"], D)}
    for i in range(1, SIZES["blocks"] + 1):
        inner = {"norm": (D,), "z": (D, M * P), "x": (D, M * P), "B": (D, G * N), "C": (D, G * N), "dt": (D, M),
                 "conv_x": (W, M * P), "conv_B": (W, G * N), "conv_C": (W, G * N), "bias_x": (M * P,), "bias_B": (G * N,),
                 "bias_C": (G * N,), "dt_bias": (M,), "A_log": (M,), "skip": (M,), "gate_norm": (M * P,), "out": (M * P, D)}
        if options:
            inner = {name: shape for name, shape in inner.items() if "bias" not in name} | {"skip": (M * P,)}
        shapes |= {f"{i}.mamba2.{name}": shape for name, shape in inner.items()}
    shapes |= {f"{SIZES['blocks'] + 1}.norm.norm": (D,), f"{SIZES['blocks'] + 2}.head.head": (D, SIZES["vocab"])}
    return {name: 0.4 * rng.standard_normal(shape) + name.endswith("norm") for name, shape in shapes.items()}


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SIZES["norm_eps"])


def causal_conv(u, weight, bias):
    """u [S, C], weight [W, C]: torch's conv, with the taps turned, on an input that is padded in front."""
    taps = weight.flip(0).T[:, None]                                                # [C, 1, W]
    bias = torch.zeros(u.shape[1], dtype=u.dtype) if bias is None else bias
    return F.conv1d(F.pad(u.T[None], (len(weight) - 1, 0)), taps, bias, groups=u.shape[1])[0].T


def mixer(h, w, options):
    """One document [S, D] -> [S, D]."""
    M, P, G, N = (SIZES[name] for name in ("ssm_heads", "ssm_head_width", "groups", "state"))
    x, B, C = (causal_conv(h @ w[name], w[f"conv_{name}"], w.get(f"bias_{name}")) for name in "xBC")
    x, B, C = (x, B, C) if options else map(F.silu, (x, B, C))
    x, step = x.view(-1, M, P), F.softplus(h @ w["dt"] + w.get("dt_bias", 0))
    step = step.clamp(options["dt_least"], options["dt_most"]) if options else step
    skip = w["skip"].view(M, P if options else 1)
    B, C = (u.view(-1, G, N).repeat_interleave(M // G, dim=1) for u in (B, C))      # [S, M, N]
    decay = torch.exp(-step * w["A_log"].exp())
    state, ys = torch.zeros(M, P, N, dtype=h.dtype), []
    for t in range(len(h)):
        state = decay[t, :, None, None] * state + step[t, :, None, None] * torch.einsum("mp,mn->mpn", x[t], B[t])
        ys.append(torch.einsum("mpn,mn->mp", state, C[t]) + skip * x[t])
    y, gate = torch.stack(ys).reshape(len(h), M * P), F.silu(h @ w["z"])
    if options:
        return rms(y.view(-1, 2, 9)).reshape(len(h), M * P) * w["gate_norm"] * gate @ w["out"]
    gated = y * gate
    return rms(gated.view(-1, G, M * P // G)).reshape(len(h), M * P) * w["gate_norm"] @ w["out"]


def logits_of(tokens, weights, options):
    """One document [S] -> [S, V]."""
    x = weights["0.embedding.table"][tokens]
    for i in range(1, SIZES["blocks"] + 1):
        w = {name.split(".")[2]: weight for name, weight in weights.items() if name.startswith(f"{i}.mamba2.")}
        x = x + mixer(rms(x) * w["norm"], w, options)
    return rms(x) * weights[f"{SIZES['blocks'] + 1}.norm.norm"] @ weights[f"{SIZES['blocks'] + 2}.head.head"]


def batch_loss(weights, tokens, targets, options):
    """(mean loss over the targets that count, logits [B, S, V])."""
    rows = [torch.cat([logits_of(part, weights, options) for part in row.split([length for _, length in documents])])
            for row, documents in zip(tokens, ROWS)]
    logits = torch.stack(rows)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), logits


def record(begin, weights, tokens, targets, options):
    """Three steps of one model -> what to keep of them, under names that begin alike."""
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}
    kept = {f"weights/{name}": weight.detach().numpy().copy() for name, weight in weights.items()}
    groups = [{"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": TRAINING["decay"]},
              {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=TRAINING["rate"], betas=(TRAINING["beta1"], TRAINING["beta2"]), eps=TRAINING["eps"])
    losses, norms = [], []
    for step in range(STEPS):
        adamw.zero_grad()
        loss, logits = batch_loss(weights, torch.tensor(tokens), torch.tensor(targets), options)
        loss.backward()
        if step == 0:
            kept["logits"] = logits.detach().numpy().copy()
            kept |= {f"gradients/{name}": weight.grad.numpy().copy() for name, weight in weights.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), TRAINING["clip"])))
        losses.append(float(loss.detach()))
        adamw.step()
    kept |= {f"after/{name}": weight.detach().numpy() for name, weight in weights.items()}
    print(f"losses {losses}, norms {norms}")
    return {begin + name: array for name, array in (kept | {"losses": np.array(losses), "norms": np.array(norms)}).items()}


def main():
    rng = np.random.default_rng(20240521)
    weights = drawn_weights(rng, {})
    position = np.array([[first + t for first, length in documents for t in range(length)] for documents in ROWS])
    tokens = rng.integers(0, SIZES["vocab"], position.shape)
    targets = np.where(rng.random(position.shape) < 0.2, -1, rng.integers(0, SIZES["vocab"], position.shape))
    kept = {"tokens": tokens, "targets": targets, "position": position} | record("", weights, tokens, targets, {})
    kept |= record("otherwise/", drawn_weights(rng, OTHERWISE), tokens, targets, OTHERWISE)
    path = Path(__file__).with_name("mamba2.npz")
    np.savez_compressed(path, **kept)
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
