"""Records two small Llama-like models run by PyTorch in float64, one with tied embeddings: llama.npz, with which
`test_recordings.py` compares ours.

    python tests/recordings/record_llama.py             (needs torch)

Plain PyTorch, independent of refpar, and it imports nothing of it: every document is run alone, so nothing here masks documents;
torch's own attention, SiLU and cross-entropy compute, autograd differentiates, torch's AdamW steps.
"""
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

SIZES = dict(blocks=2, vocab=13, width=7, heads=4, kv_heads=2, head_width=4, ffn=5, rope_base=50.0, norm_eps=1e-4)
STEPS, TRAINING = 3, dict(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=0.5)
ROWS = [[(3, 4), (0, 1), (0, 9)], [(0, 14)], [(7, 2), (0, 5), (0, 2), (0, 5)]]      # documents: first position, length


def drawn_weights(rng, tied):
    """name -> array; nothing at its usual 1 or 0."""
    V, D, H, K, E, F_ = (SIZES[name] for name in ("vocab", "width", "heads", "kv_heads", "head_width", "ffn"))
    shapes = {"0.embedding.table": (V, D)}
    for block in range(SIZES["blocks"]):
        attention = {"norm": (D,), "q": (D, H * E), "k": (D, K * E), "v": (D, K * E), "o": (H * E, D)}
        mlp = {"norm": (D,), "gate_up": (2, D, F_), "down": (F_, D)}
        shapes |= {f"{2 * block + 1}.attention.{name}": shape for name, shape in attention.items()}
        shapes |= {f"{2 * block + 2}.mlp.{name}": shape for name, shape in mlp.items()}
    last = 2 * SIZES["blocks"] + 1
    shapes |= {f"{last}.norm.norm": (D,)} | ({} if tied else {f"{last + 1}.head.head": (D, V)})
    return {name: 0.4 * rng.standard_normal(shape) + name.endswith("norm") for name, shape in shapes.items()}


def rms(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + SIZES["norm_eps"])


def turned(x, position):
    """x [S, H, E]: features 2i and 2i+1 turned by position / base**(2i/E), with a two by two matrix each."""
    width = SIZES["head_width"]
    angle = position[:, None] / SIZES["rope_base"] ** (torch.arange(0, width, 2, dtype=x.dtype) / width)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()], -1), torch.stack([angle.sin(), angle.cos()], -1)], -2)
    return torch.einsum("spij,shpj->shpi", turn, x.unflatten(2, (width // 2, 2))).flatten(2)


def attention(h, w, position):
    """One document [S, D] -> [S, D]."""
    heads, kv_heads = SIZES["heads"], SIZES["kv_heads"]
    q, k, v = (F.linear(h, w[name].T).unflatten(1, (n, SIZES["head_width"])) for name, n in
               (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    q, k = turned(q, position), turned(k, position)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True)
    return F.linear(out.transpose(0, 1).flatten(1), w["o"].T)


def mlp(h, w):
    gate, up = w["gate_up"]
    return (F.silu(h @ gate) * (h @ up)) @ w["down"]


def logits_of(tokens, position, weights):
    """One document [S] -> [S, V]."""
    def of(layer):
        return {name.removeprefix(f"{layer}."): weight for name, weight in weights.items() if name.startswith(f"{layer}.")}
    x = F.embedding(tokens, weights["0.embedding.table"])
    for block in range(SIZES["blocks"]):
        w = of(f"{2 * block + 1}.attention")
        x = x + attention(rms(x) * w["norm"], w, position)
        w = of(f"{2 * block + 2}.mlp")
        x = x + mlp(rms(x) * w["norm"], w)
    last = 2 * SIZES["blocks"] + 1
    x = rms(x) * weights[f"{last}.norm.norm"]
    head = weights.get(f"{last + 1}.head.head")
    return F.linear(x, weights["0.embedding.table"]) if head is None else x @ head


def batch_loss(weights, tokens, targets, position):
    """(mean loss over the targets that count, logits [B, S, V])."""
    rows = []
    for row, where, documents in zip(tokens, position, ROWS):
        lengths = [length for _, length in documents]
        rows.append(torch.cat([logits_of(*part, weights) for part in zip(row.split(lengths), where.split(lengths))]))
    logits = torch.stack(rows)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), logits


def recorded(rng, tied, tokens, targets, position):
    """Weights before and after, logits, gradients and losses of one model."""
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in drawn_weights(rng, tied).items()}
    kept = {f"weights/{name}": weight.detach().numpy().copy() for name, weight in weights.items()}
    groups = [{"params": [w for w in weights.values() if w.ndim > 1], "weight_decay": TRAINING["decay"]},
              {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=TRAINING["rate"], betas=(TRAINING["beta1"], TRAINING["beta2"]), eps=TRAINING["eps"])
    losses, norms = [], []
    for step in range(STEPS):
        adamw.zero_grad()
        loss, logits = batch_loss(weights, *(torch.tensor(x) for x in (tokens, targets, position)))
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
    rng = np.random.default_rng(20230227)
    position = np.array([[first + t for first, length in documents for t in range(length)] for documents in ROWS])
    tokens = rng.integers(0, SIZES["vocab"], position.shape)
    targets = np.where(rng.random(position.shape) < 0.2, -1, rng.integers(0, SIZES["vocab"], position.shape))
    kept = {"tokens": tokens, "targets": targets, "position": position}
    for name, tied in (("untied", False), ("tied", True)):
        model = recorded(rng, tied, tokens, targets, position)
        print(f"{name}: losses {model['losses']}, norms {model['norms']}")
        kept |= {f"{name}/{key}": array for key, array in model.items()}
    path = Path(__file__).with_name("llama.npz")
    np.savez_compressed(path, **kept)
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
