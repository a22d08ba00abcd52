"""Records Hugging Face's own classes, small and with random weights: hf_*.npz, with which `test_recordings_hf.py` compares ours.

    python tests/recordings/record_hf.py [gpt2 llama mamba mamba2]            (needs torch and transformers)

The file has the class's config.json, its weights, logits, loss, every gradient, and the weights after three AdamW steps, all under
the class's own names and in its own layouts; nothing of refpar is imported.  Everything is computed in float64 as far as the class
lets it: GPT-2 does to the end, so its loss is taken here, from its logits (the class's own is computed in float32).  The others turn
to float32 inside, whatever they are told (norms, rotary angles, scans, logits), so they are run in float32 altogether.
"""
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

STEPS, TRAINING = 3, dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
DECAY, CLIP = 0.1, 0.5
ROWS, TOKENS = 2, 11
SIZES = dict(vocab_size=17, num_hidden_layers=2)

MODELS = {
    "gpt2": (transformers.GPT2LMHeadModel, dict(n_embd=12, n_head=3, n_positions=16, n_inner=20, resid_pdrop=0.0, embd_pdrop=0.0,
                                                attn_pdrop=0.0, bos_token_id=None, eos_token_id=None), torch.float64),
    "llama": (transformers.LlamaForCausalLM, dict(
        hidden_size=12, intermediate_size=14, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 50.0}), torch.float32),
    "mamba": (transformers.MambaForCausalLM, dict(hidden_size=10, state_size=5, expand=2, conv_kernel=3, time_step_rank=3,
                                                  layer_norm_epsilon=1e-4), torch.float32),
    "mamba2": (transformers.Mamba2ForCausalLM, dict(hidden_size=12, num_heads=6, head_dim=4, n_groups=2, state_size=5, conv_kernel=3,
                                                    chunk_size=4, layer_norm_epsilon=1e-4), torch.float32),
}


def drawn(model):
    """Weights with nothing at its usual 1 or 0."""
    rng = torch.Generator().manual_seed(20260718)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            about = 1.0 if weight.ndim == 1 and ("norm" in name or "ln_" in name) and "weight" in name else 0.0
            weight.copy_(about + 0.3 * torch.randn(weight.shape, generator=rng, dtype=torch.float64))


def arrays(tensors, begin):
    return {f"{begin}/{name}": tensor.detach().numpy().copy() for name, tensor in tensors}


def recorded(kind):
    build, sizes, dtype = MODELS[kind]
    model = build(build.config_class(**SIZES, **sizes)).to(dtype)
    drawn(model)
    rng = np.random.default_rng(20260718)
    tokens = rng.integers(0, SIZES["vocab_size"], (ROWS, TOKENS))
    labels = np.where(rng.random(tokens.shape) < 0.2, -100, tokens)                 # the class moves them: token t predicts t+1
    kept = {"tokens": tokens, "labels": labels, "config": np.array(model.config.to_json_string(use_diff=False))}
    kept |= arrays(model.named_parameters(), "weights")

    weights = list(model.parameters())
    groups = [{"params": [w for w in weights if w.ndim > 1], "weight_decay": DECAY},
              {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, **TRAINING)
    losses = []
    for step in range(STEPS):
        adamw.zero_grad()
        out = model(torch.tensor(tokens), labels=torch.tensor(labels), use_cache=False)
        loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), torch.tensor(labels[:, 1:]).flatten())
        loss.backward()
        if step == 0:
            kept |= {"logits": out.logits.detach().numpy().copy(), "own_loss": out.loss.detach().numpy()}
            kept |= arrays(((name, weight.grad) for name, weight in model.named_parameters()), "gradients")
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        losses.append(loss.item())
        adamw.step()
    return kept | arrays(model.named_parameters(), "after") | {"losses": np.array(losses)}


def main(kinds):
    for kind in kinds:
        path = Path(__file__).with_name(f"hf_{kind}.npz")
        kept = recorded(kind)
        np.savez_compressed(path, **kept)
        print(f"{path.name}: {path.stat().st_size} bytes, logits {kept['logits'].dtype}, losses {kept['losses']}")


if __name__ == "__main__":
    main(sys.argv[1:] or MODELS)
