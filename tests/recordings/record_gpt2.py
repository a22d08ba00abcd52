"""Records two small GPT-2-like models run by PyTorch in float64: gpt2.npz, with which `test_recordings.py` compares ours.

    python tests/recordings/record_gpt2.py             (needs torch)

The first is GPT-2 as it is: LayerNorm, learned positions, biases, GELU in its tanh form, tied embeddings.  The second has what other
models took from elsewhere: an untied head, GELU in its exact form, a norm of each head's queries and keys, rotary pairs made of
halves, a sliding window, a soft cap on the logits, label smoothing and a z-loss.

Plain PyTorch, independent of refpar, and it imports nothing of it: every document is run alone, so nothing here masks documents;
torch's own attention, norms, GELU and cross-entropy compute, autograd differentiates, torch's AdamW steps.  AdamW's eps is large,
because the gradient of a key's bias is 0 but for rounding, and a small one would make a step of the rounding.
"""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SIZES = dict(blocks=2, vocab=13, width=7, heads=4, head_width=4, ffn=9, longest=16, norm_eps=1e-4)
STEPS, TRAINING = 3, dict(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, eps=1e-3, clip=0.5)
ROWS = [[(3, 4), (0, 1), (0, 9)], [(0, 14)], [(7, 2), (0, 5), (0, 2), (0, 5)]]      # documents: first position, length
OTHER = dict(rope_base=50.0, window=4, softcap=3.0, smoothing=0.1, z_loss=0.05)


def drawn_weights(rng, other):
    """name -> array; nothing at its usual 1 or 0."""
    V, D, F_, X, E = (SIZES[name] for name in ("vocab", "width", "ffn", "longest", "head_width"))
    HE = SIZES["heads"] * E
    norm = {"norm": (D,), "norm_bias": (D,)}
    shapes = {"0.embedding.table": (V, D)} | ({} if other else {"0.embedding.position": (X, D)})
    for block in range(SIZES["blocks"]):
        attention = {name: (D, HE) for name in "qkv"} | {f"{name}_bias": (HE,) for name in "qkv"} | {"o": (HE, D), "o_bias": (D,)}
        attention |= {"q_norm": (E,), "k_norm": (E,)} if other else {}
        mlp = {"up": (D, F_), "up_bias": (F_,), "down": (F_, D), "down_bias": (D,)}
        shapes |= {f"{2 * block + 1}.attention.{name}": shape for name, shape in (attention | norm).items()}
        shapes |= {f"{2 * block + 2}.mlp.{name}": shape for name, shape in (mlp | norm).items()}
    last = 2 * SIZES["blocks"] + 1
    shapes |= {f"{last}.norm.{name}": shape for name, shape in norm.items()} | ({f"{last + 1}.head.head": (D, V)} if other else {})
    return {name: 0.4 * rng.standard_normal(shape) + name.endswith("norm") for name, shape in shapes.items()}


def layer_norm(x, w):
    return F.layer_norm(x, x.shape[-1:], w["norm"], w["norm_bias"], SIZES["norm_eps"])


def turned(x, position):
    """x [S, H, E]: features i and E/2+i turned by position / base**(2i/E), as x cos + (-second half, first half) sin."""
    half = SIZES["head_width"] // 2
    angle = position[:, None, None] / OTHER["rope_base"] ** (torch.arange(half, dtype=x.dtype) / half)
    cos, sin = (torch.cat([f, f], -1) for f in (angle.cos(), angle.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def attention(h, w, position, other):
    """One document [S, D] -> [S, D]."""
    q, k, v = (F.linear(h, w[name].T, w[f"{name}_bias"]).unflatten(1, (SIZES["heads"], SIZES["head_width"])) for name in "qkv")
    seen = torch.ones(len(h), len(h), dtype=torch.bool).tril()
    if other:
        q, k = (F.rms_norm(x, x.shape[-1:], w[f"{name}_norm"], SIZES["norm_eps"]) for x, name in ((q, "q"), (k, "k")))
        q, k = turned(q, position), turned(k, position)
        seen = seen.triu(1 - OTHER["window"])
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), attn_mask=seen)
    return F.linear(out.transpose(0, 1).flatten(1), w["o"].T, w["o_bias"])


def mlp(h, w, other):
    a = F.gelu(F.linear(h, w["up"].T, w["up_bias"]), approximate="none" if other else "tanh")
    return F.linear(a, w["down"].T, w["down_bias"])


def logits_of(tokens, position, weights, other):
    """One document [S] -> [S, V]."""
    def of(layer):
        return {name.removeprefix(f"{layer}."): weight for name, weight in weights.items() if name.startswith(f"{layer}.")}
    x = F.embedding(tokens, weights["0.embedding.table"])
    if not other:
        x = x + F.embedding(position, weights["0.embedding.position"])
    for block in range(SIZES["blocks"]):
        w = of(f"{2 * block + 1}.attention")
        x = x + attention(layer_norm(x, w), w, position, other)
        w = of(f"{2 * block + 2}.mlp")
        x = x + mlp(layer_norm(x, w), w, other)
    last = 2 * SIZES["blocks"] + 1
    x = layer_norm(x, of(f"{last}.norm"))
    if not other:
        return F.linear(x, weights["0.embedding.table"])
    return OTHER["softcap"] * torch.tanh(x @ weights[f"{last + 1}.head.head"] / OTHER["softcap"])


def batch_loss(weights, tokens, targets, position, other):
    """(mean loss over the targets that count, logits [B, S, V])."""
    rows = []
    for row, where, documents in zip(tokens, position, ROWS):
        lengths = [length for _, length in documents]
        rows.append(torch.cat([logits_of(*part, weights, other) for part in zip(row.split(lengths), where.split(lengths))]))
    logits = torch.stack(rows)
    if not other:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=OTHER["smoothing"])
    return loss + OTHER["z_loss"] * logits[targets >= 0].logsumexp(-1).square().mean(), logits


def recorded(rng, other, tokens, targets, position):
    """Weights before and after, logits, gradients and losses of one model."""
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in drawn_weights(rng, other).items()}
    kept = {f"weights/{name}": weight.detach().numpy().copy() for name, weight in weights.items()}
    groups = [{"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": TRAINING["decay"]},
              {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=TRAINING["rate"], betas=(TRAINING["beta1"], TRAINING["beta2"]), eps=TRAINING["eps"])
    losses, norms = [], []
    for step in range(STEPS):
        adamw.zero_grad()
        loss, logits = batch_loss(weights, *(torch.tensor(x) for x in (tokens, targets, position)), other)
        loss.backward()
        if step == 0:
            kept["logits"] = logits.detach().numpy().copy()
            kept |= {f"gradients/{name}": weight.grad.numpy().copy() for name, weight in weights.items()}
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), TRAINING["clip"])))
        losses.append(float(loss.detach()))
        adamw.step()
    kept |= {f"after/{name}": weight.detach().numpy() for name, weight in weights.items()}
    return kept | {"losses": np.array(losses), "norms": np.array(norms)}


def main():
    rng = np.random.default_rng(20190214)
    position = np.array([[first + t for first, length in documents for t in range(length)] for documents in ROWS])
    tokens = rng.integers(0, SIZES["vocab"], position.shape)
    targets = np.where(rng.random(position.shape) < 0.2, -1, rng.integers(0, SIZES["vocab"], position.shape))
    kept = {"tokens": tokens, "targets": targets, "position": position}
    for name, other in (("gpt2", False), ("other", True)):
        model = recorded(rng, other, tokens, targets, position)
        print(f"{name}: losses {model['losses']}, norms {model['norms']}")
        kept |= {f"{name}/{key}": array for key, array in model.items()}
    path = Path(__file__).with_name("gpt2.npz")
    np.savez_compressed(path, **kept)
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
