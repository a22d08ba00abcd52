"""Records a small Mamba-1 model run by PyTorch in float64: mamba1.npz, with which `test_recordings.py` compares ours.

    python tests/recordings/record_mamba1.py            (needs torch)

Written from the papers' formulas, token by token, and independently of refpar: every document is run alone, so nothing here resets
anything; the conv is torch's, autograd differentiates, torch's AdamW steps.  Imports nothing of refpar.
"""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SIZES = dict(blocks=2, vocab=17, width=10, inner=9, dt_rank=3, state=4, conv=3, norm_eps=1e-4)
STEPS, TRAINING = 3, dict(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=0.5)
ROWS = [[(3, 4), (0, 1), (0, 9)], [(0, 14)], [(7, 2), (0, 5), (0, 2), (0, 5)]]      # documents: first position, length


def drawn_weights(rng):
    """name -> array; nothing at its usual 1 or 0."""
    D, I, R, N, W = (SIZES[name] for name in ("width", "inner", "dt_rank", "state", "conv"))
    shapes = {"0.embedding.table": (SIZES["vocab"], D)}
    for i in range(1, SIZES["blocks"] + 1):
        inner = {"norm": (D,), "x": (D, I), "z": (D, I), "conv": (W, I), "conv_bias": (I,), "dt_low": (I, R), "B": (I, N),
                 "C": (I, N), "dt": (R, I), "dt_bias": (I,), "A_log": (I, N), "skip": (I,), "out": (I, D)}
        shapes |= {f"{i}.mamba1.{name}": shape for name, shape in inner.items()}
    shapes |= {f"{SIZES['blocks'] + 1}.norm.norm": (D,), f"{SIZES['blocks'] + 2}.head.head": (D, SIZES["vocab"])}
    return {name: 0.4 * rng.standard_normal(shape) + name.endswith("norm") for name, shape in shapes.items()}


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SIZES["norm_eps"])


def causal_conv(u, weight, bias):
    """u [S, C], weight [W, C]: torch's conv, with the taps turned, on an input that is padded in front."""
    taps = weight.flip(0).T[:, None]                                                # [C, 1, W]
    return F.conv1d(F.pad(u.T[None], (len(weight) - 1, 0)), taps, bias, groups=u.shape[1])[0].T


def mixer(h, w):
    """One document [S, D] -> [S, D]."""
    x, z = F.silu(causal_conv(h @ w["x"], w["conv"], w["conv_bias"])), h @ w["z"]
    step = F.softplus(x @ w["dt_low"] @ w["dt"] + w["dt_bias"])                     # [S, I]
    B, C, A = x @ w["B"], x @ w["C"], -w["A_log"].exp()
    state, ys = torch.zeros_like(A), []                                             # [I, N]
    for t in range(len(h)):
        state = torch.exp(step[t, :, None] * A) * state + (step[t] * x[t])[:, None] * B[t]
        ys.append(state @ C[t] + w["skip"] * x[t])
    return torch.stack(ys) * F.silu(z) @ w["out"]


def logits_of(tokens, weights):
    """One document [S] -> [S, V]."""
    x = weights["0.embedding.table"][tokens]
    for i in range(1, SIZES["blocks"] + 1):
        w = {name.split(".")[2]: weight for name, weight in weights.items() if name.startswith(f"{i}.mamba1.")}
        x = x + mixer(rms(x) * w["norm"], w)
    return rms(x) * weights[f"{SIZES['blocks'] + 1}.norm.norm"] @ weights[f"{SIZES['blocks'] + 2}.head.head"]


def batch_loss(weights, tokens, targets):
    """(mean loss over the targets that count, logits [B, S, V])."""
    rows = [torch.cat([logits_of(part, weights) for part in row.split([length for _, length in documents])])
            for row, documents in zip(tokens, ROWS)]
    logits = torch.stack(rows)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), logits


def main():
    rng = np.random.default_rng(20240521)
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in drawn_weights(rng).items()}
    position = np.array([[first + t for first, length in documents for t in range(length)] for documents in ROWS])
    tokens = rng.integers(0, SIZES["vocab"], position.shape)
    targets = np.where(rng.random(position.shape) < 0.2, -1, rng.integers(0, SIZES["vocab"], position.shape))
    kept = {"tokens": tokens, "targets": targets, "position": position}
    kept |= {f"weights/{name}": weight.detach().numpy().copy() for name, weight in weights.items()}

    groups = [{"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": TRAINING["decay"]},
              {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=TRAINING["rate"], betas=(TRAINING["beta1"], TRAINING["beta2"]), eps=TRAINING["eps"])
    losses, norms = [], []
    for step in range(STEPS):
        adamw.zero_grad()
        loss, logits = batch_loss(weights, torch.tensor(tokens), torch.tensor(targets))
        loss.backward()
        if step == 0:
            kept["logits"] = logits.detach().numpy().copy()
            kept |= {f"gradients/{name}": weight.grad.numpy().copy() for name, weight in weights.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), TRAINING["clip"])))
        losses.append(float(loss.detach()))
        adamw.step()
    kept |= {f"after/{name}": weight.detach().numpy() for name, weight in weights.items()}
    kept |= {"losses": np.array(losses), "norms": np.array(norms)}
    path = Path(__file__).with_name("mamba1.npz")
    np.savez_compressed(path, **kept)
    print(f"{path.name}: {path.stat().st_size} bytes, losses {losses}, norms {norms}")


if __name__ == "__main__":
    main()
