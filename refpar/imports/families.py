"""The tables: for each class of Hugging Face checkpoints, every array it has, and the parameters of refpar that lie in it.

An array of theirs is one or more parameters of ours, each seen through a *layout*, one after another along a dim.  A layout is a
view: it moves no element, so the same line reads an array into our parameters and writes them back.

    "...mixer.in_proj.weight": Array("mamba2: z x B C dt", TURNED)      five weights (in, out) of ours, turned, joined by rows

`gate_up.0` is part 0 of a parameter that is stacked.  `{}` counts blocks.  Constants are arrays that some versions store though
nothing is learned in them: they are passed over.
"""
from __future__ import annotations

from typing import Any, Callable, NamedTuple

from refpar.config import Model


class Layout(NamedTuple):
    """view(w, config): our parameter, its dims in their order; where a dim of theirs is several of the view's, it is the first.
    rank: how many dims theirs has beyond ours."""
    view: Callable
    rank: int = 0


def _halves(w, config: Model):
    """A head's rotary pairs stand side by side here, and their two halves of the head apart there:
    [..., HE] -> [H, 2, E/2, ...], whose first three dims are one dim of theirs."""
    pairs = config.head_width // 2
    heads = w.shape[-1] // config.head_width
    split = w.reshape(*w.shape[:-1], heads, pairs, 2)
    first = split.ndim - 3
    return split.transpose(first, first + 2, first + 1, *range(first))


SAME = Layout(lambda w, config: w)
TURNED = Layout(lambda w, config: w.T)                                  # (in, out) -> (out, in)
HALVES = Layout(_halves)                                                # the same, and the rotary pairs apart
TAPS = Layout(lambda w, config: w[::-1].T[:, None], rank=1)             # [W, C], the newest first -> [C, 1, W], the oldest first


class Array(NamedTuple):
    """An array of theirs.  pieces: "layer: parameter parameter ...", joined along `dim`."""
    pieces: str
    layout: Layout = SAME
    dim: int = 0


class Family(NamedTuple):
    """A class of checkpoints.

    prefix: what every name begins with but the head's; a checkpoint of the class without a head may leave it out.
    fields: our field -> theirs in config.json.  derived: our field -> its value where theirs is not given.
    only: fields of theirs with the one value that refpar computes; not given, they have it.
    ours: fields of ours that the class fixes.
    """
    pattern: tuple[str, ...]
    prefix: str
    arrays: dict[str, Array]
    fields: dict[str, str]
    derived: dict[str, Callable]
    only: dict[str, Any]
    ours: dict[str, Any] = {}
    constants: tuple[str, ...] = ()


_LLAMA_BLOCK = {
    "input_layernorm.weight": Array("attention: norm"),
    "self_attn.q_proj.weight": Array("attention: q", HALVES),
    "self_attn.k_proj.weight": Array("attention: k", HALVES),
    "self_attn.v_proj.weight": Array("attention: v", TURNED),
    "self_attn.o_proj.weight": Array("attention: o", TURNED),
    "post_attention_layernorm.weight": Array("mlp: norm"),
    "mlp.gate_proj.weight": Array("mlp: gate_up.0", TURNED),
    "mlp.up_proj.weight": Array("mlp: gate_up.1", TURNED),
    "mlp.down_proj.weight": Array("mlp: down", TURNED),
}
_MAMBA2_BLOCK = {
    "norm.weight": Array("mamba2: norm"),
    "mixer.in_proj.weight": Array("mamba2: z x B C dt", TURNED),
    "mixer.conv1d.weight": Array("mamba2: conv_x conv_B conv_C", TAPS),
    "mixer.conv1d.bias": Array("mamba2: bias_x bias_B bias_C"),
    "mixer.dt_bias": Array("mamba2: dt_bias"),
    "mixer.A_log": Array("mamba2: A_log"),
    "mixer.D": Array("mamba2: skip"),
    "mixer.norm.weight": Array("mamba2: gate_norm"),
    "mixer.out_proj.weight": Array("mamba2: out", TURNED),
}


def _blocks(begin: str, block: dict[str, Array]) -> dict[str, Array]:
    return {f"{begin}.{{}}.{name}": array for name, array in block.items()}


FAMILIES: dict[str, Family] = {                         # by model_type of config.json
    "llama": Family(
        pattern=("attention", "mlp"), prefix="model.",
        arrays={"model.embed_tokens.weight": Array("embedding: table"), **_blocks("model.layers", _LLAMA_BLOCK),
                "model.norm.weight": Array("norm: norm"), "lm_head.weight": Array("head: head", TURNED)},
        fields={"blocks": "num_hidden_layers", "vocab": "vocab_size", "width": "hidden_size", "heads": "num_attention_heads",
                "kv_heads": "num_key_value_heads", "head_width": "head_dim", "ffn": "intermediate_size", "rope_base": "rope_theta",
                "norm_eps": "rms_norm_eps", "tied": "tie_word_embeddings"},
        derived={"kv_heads": lambda given: given["heads"], "head_width": lambda given: given["width"] // given["heads"],
                 "rope_base": lambda given: 10000.0, "norm_eps": lambda given: 1e-6, "tied": lambda given: False},
        only={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None},
        constants=(".rotary_emb.inv_freq",)),
    "mamba2": Family(
        pattern=("mamba2",), prefix="backbone.",
        arrays={"backbone.embeddings.weight": Array("embedding: table"), **_blocks("backbone.layers", _MAMBA2_BLOCK),
                "backbone.norm_f.weight": Array("norm: norm"), "lm_head.weight": Array("head: head", TURNED)},
        fields={"blocks": "num_hidden_layers", "vocab": "vocab_size", "width": "hidden_size", "ssm_heads": "num_heads",
                "ssm_head_width": "head_dim", "groups": "n_groups", "state": "state_size", "conv": "conv_kernel",
                "chunk": "chunk_size", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings"},
        derived={"conv": lambda given: 4, "chunk": lambda given: 256, "norm_eps": lambda given: 1e-5, "tied": lambda given: False},
        only={"hidden_act": "silu", "use_bias": False, "use_conv_bias": True}),
}
