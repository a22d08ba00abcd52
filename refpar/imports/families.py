"""The tables: for each class of Hugging Face checkpoints, every array it has, and the parameters of refpar that lie in it.

An array of theirs is one or more parameters of ours, each seen through a *layout*, one after another along a dim.  A layout is a
view: it moves no element, so the same line reads an array into our parameters and writes them back.

    "...mixer.in_proj.weight": Array("mamba2: z x B C dt", TURNED)      five weights (in, out) of ours, turned, joined by rows

`gate_up.0` is part 0 of a parameter that is stacked.  `{}` counts blocks.  Constants are arrays that some versions store though
nothing is learned in them: they are passed over.
"""
from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple

from refpar.config import Model


class Layout(NamedTuple):
    """view(w, config): our parameter, its dims in their order; where a dim of theirs is several of the view's, it is the first.
    rank: how many dims theirs has beyond ours."""
    view: Callable
    rank: int = 0


def _halves(w, config: Model):
    """A head's rotary pairs stand side by side here, and their two halves of the head apart there:
    [..., HE] -> [H, 2, E/2, ...], whose first three dims are one dim of theirs.  A model that turns halves has theirs already."""
    if config.rope_pairs == "halves":
        return w.T
    pairs = config.head_width // 2
    split = w.reshape(*w.shape[:-1], w.shape[-1] // config.head_width, pairs, 2)
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
    arrays: those whose parameters a model does not have (biases, a head of its own) are not in its checkpoints.
    fields: our field -> theirs in config.json.  derived: our field -> its value where theirs is not given, from ours and theirs.
    words: our field -> their word -> ours.  computed: fields of theirs that follow from our model.
    only: fields of theirs with the one value that refpar computes; not given, they have it.
    ours: fields of ours that the class fixes.
    """
    pattern: tuple[str, ...]
    prefix: str
    arrays: dict[str, Array]
    fields: dict[str, str]
    derived: dict[str, Callable]
    only: dict[str, Any]
    ours: dict[str, Any]
    words: dict[str, dict[Any, Any]] = {}
    computed: dict[str, Callable] = {}
    constants: tuple[str, ...] = ()


def always(value) -> Callable:
    """A default that follows from nothing."""
    return lambda ours, theirs: value


def _blocks(begin: str, block: dict[str, Array]) -> dict[str, Array]:
    return {f"{begin}.{{}}.{name}": array for name, array in block.items()}


HEAD = "lm_head.weight"
_TRANSFORMER = dict(qk_norm=False, window=0, softcap=0.0)               # variants that neither Llama nor GPT-2 has
_SCAN = dict(norm="rms", dt_bias=True, conv_act="silu", softcap=0.0)

_GPT2 = Family(
    pattern=("attention", "mlp"), prefix="transformer.",
    arrays={
        "transformer.wte.weight": Array("embedding: table"),
        "transformer.wpe.weight": Array("embedding: position"),
        **_blocks("transformer.h", {
            "ln_1.weight": Array("attention: norm"),
            "ln_1.bias": Array("attention: norm_bias"),
            "attn.c_attn.weight": Array("attention: q k v", dim=1),
            "attn.c_attn.bias": Array("attention: q_bias k_bias v_bias"),
            "attn.c_proj.weight": Array("attention: o"),
            "attn.c_proj.bias": Array("attention: o_bias"),
            "ln_2.weight": Array("mlp: norm"),
            "ln_2.bias": Array("mlp: norm_bias"),
            "mlp.c_fc.weight": Array("mlp: up"),
            "mlp.c_fc.bias": Array("mlp: up_bias"),
            "mlp.c_proj.weight": Array("mlp: down"),
            "mlp.c_proj.bias": Array("mlp: down_bias"),
        }),
        "transformer.ln_f.weight": Array("norm: norm"),
        "transformer.ln_f.bias": Array("norm: norm_bias"),
        HEAD: Array("head: head", TURNED),
    },
    fields={"blocks": "n_layer", "vocab": "vocab_size", "longest": "n_positions", "width": "n_embd", "heads": "n_head",
            "ffn": "n_inner", "mlp": "activation_function", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings"},
    derived={"ffn": lambda ours, theirs: 4 * ours["width"], "mlp": always("gelu_tanh"), "norm_eps": always(1e-5),
             "tied": always(True), "kv_heads": lambda ours, theirs: ours["heads"],
             "head_width": lambda ours, theirs: ours["width"] // ours["heads"]},
    words={"mlp": {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}},
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ours=_TRANSFORMER | dict(norm="layer", positions="learned", attention_bias="all", mlp_bias=True),
    constants=(".attn.bias", ".attn.masked_bias"))

_LLAMA = Family(
    pattern=("attention", "mlp"), prefix="model.",
    arrays={
        "model.embed_tokens.weight": Array("embedding: table"),
        **_blocks("model.layers", {
            "input_layernorm.weight": Array("attention: norm"),
            "self_attn.q_proj.weight": Array("attention: q", HALVES),
            "self_attn.q_proj.bias": Array("attention: q_bias", HALVES),
            "self_attn.k_proj.weight": Array("attention: k", HALVES),
            "self_attn.k_proj.bias": Array("attention: k_bias", HALVES),
            "self_attn.v_proj.weight": Array("attention: v", TURNED),
            "self_attn.v_proj.bias": Array("attention: v_bias"),
            "self_attn.o_proj.weight": Array("attention: o", TURNED),
            "self_attn.o_proj.bias": Array("attention: o_bias"),
            "post_attention_layernorm.weight": Array("mlp: norm"),
            "mlp.gate_proj.weight": Array("mlp: gate_up.0", TURNED),
            "mlp.gate_proj.bias": Array("mlp: gate_bias"),
            "mlp.up_proj.weight": Array("mlp: gate_up.1", TURNED),
            "mlp.up_proj.bias": Array("mlp: up_bias"),
            "mlp.down_proj.weight": Array("mlp: down", TURNED),
            "mlp.down_proj.bias": Array("mlp: down_bias"),
        }),
        "model.norm.weight": Array("norm: norm"),
        HEAD: Array("head: head", TURNED),
    },
    fields={"blocks": "num_hidden_layers", "vocab": "vocab_size", "width": "hidden_size", "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads", "head_width": "head_dim", "ffn": "intermediate_size", "norm_eps": "rms_norm_eps",
            "attention_bias": "attention_bias", "mlp_bias": "mlp_bias", "tied": "tie_word_embeddings",
            "rope_base": "rope_theta", "rope_scaling": "rope_type", "rope_factor": "factor", "rope_low": "low_freq_factor",
            "rope_high": "high_freq_factor", "rope_original": "original_max_position_embeddings"},
    derived={"kv_heads": lambda ours, theirs: ours["heads"], "head_width": lambda ours, theirs: ours["width"] // ours["heads"],
             "norm_eps": always(1e-6), "attention_bias": always("none"), "mlp_bias": always(False), "tied": always(False),
             "rope_base": always(10000.0), "rope_scaling": always("none"), "rope_factor": always(1.0), "rope_low": always(1.0),
             "rope_high": always(4.0), "rope_original": always(8192)},
    words={"attention_bias": {False: "none", True: "all"},
           "rope_scaling": {"default": "none", "linear": "linear", "llama3": "llama3"}},
    only={"hidden_act": "silu"},
    ours=_TRANSFORMER | dict(norm="rms", positions="rope", mlp="swiglu"),
    constants=(".rotary_emb.inv_freq",))

_MAMBA = Family(
    pattern=("mamba1",), prefix="backbone.",
    arrays={
        "backbone.embeddings.weight": Array("embedding: table"),
        **_blocks("backbone.layers", {
            "norm.weight": Array("mamba1: norm"),
            "mixer.in_proj.weight": Array("mamba1: x z", TURNED),
            "mixer.conv1d.weight": Array("mamba1: conv", TAPS),
            "mixer.conv1d.bias": Array("mamba1: conv_bias"),
            "mixer.x_proj.weight": Array("mamba1: dt_low B C", TURNED),
            "mixer.dt_proj.weight": Array("mamba1: dt", TURNED),
            "mixer.dt_proj.bias": Array("mamba1: dt_bias"),
            "mixer.A_log": Array("mamba1: A_log"),
            "mixer.D": Array("mamba1: skip"),
            "mixer.out_proj.weight": Array("mamba1: out", TURNED),
        }),
        "backbone.norm_f.weight": Array("norm: norm"),
        HEAD: Array("head: head", TURNED),
    },
    fields={"blocks": "num_hidden_layers", "vocab": "vocab_size", "width": "hidden_size", "state": "state_size",
            "dt_rank": "time_step_rank", "conv": "conv_kernel", "conv_bias": "use_conv_bias", "norm_eps": "layer_norm_epsilon",
            "tied": "tie_word_embeddings"},
    derived={"state": always(16), "dt_rank": lambda ours, theirs: math.ceil(ours["width"] / 16), "conv": always(4),
             "conv_bias": always(True), "norm_eps": always(1e-5), "tied": always(True),
             "inner": lambda ours, theirs: theirs.get("expand", 2) * ours["width"]},
    computed={"expand": lambda model: model.inner / model.width, "intermediate_size": lambda model: model.inner},
    only={"hidden_act": "silu", "use_bias": False},
    ours=_SCAN | dict(dt_least=0.0, dt_most=0.0))

_MAMBA2 = Family(
    pattern=("mamba2",), prefix="backbone.",
    arrays={
        "backbone.embeddings.weight": Array("embedding: table"),
        **_blocks("backbone.layers", {
            "norm.weight": Array("mamba2: norm"),
            "mixer.in_proj.weight": Array("mamba2: z x B C dt", TURNED),
            "mixer.conv1d.weight": Array("mamba2: conv_x conv_B conv_C", TAPS),
            "mixer.conv1d.bias": Array("mamba2: bias_x bias_B bias_C"),
            "mixer.dt_bias": Array("mamba2: dt_bias"),
            "mixer.A_log": Array("mamba2: A_log"),
            "mixer.D": Array("mamba2: skip"),
            "mixer.norm.weight": Array("mamba2: gate_norm"),
            "mixer.out_proj.weight": Array("mamba2: out", TURNED),
        }),
        "backbone.norm_f.weight": Array("norm: norm"),
        HEAD: Array("head: head", TURNED),
    },
    fields={"blocks": "num_hidden_layers", "vocab": "vocab_size", "width": "hidden_size", "ssm_heads": "num_heads",
            "ssm_head_width": "head_dim", "groups": "n_groups", "state": "state_size", "conv": "conv_kernel",
            "conv_bias": "use_conv_bias", "chunk": "chunk_size", "dt_least": "time_step_least", "dt_most": "time_step_most",
            "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings"},
    derived={"conv": always(4), "conv_bias": always(True), "chunk": always(256), "dt_least": always(0.0),
             "dt_most": always(0.0), "norm_eps": always(1e-5), "tied": always(False)},
    computed={"expand": lambda model: model.ssm_heads * model.ssm_head_width / model.width},
    only={"hidden_act": "silu", "use_bias": False},
    ours=_SCAN | dict(skip_by="head", norm_first=False, norm_group=0))

# By model_type of config.json.
FAMILIES: dict[str, Family] = {"gpt2": _GPT2, "llama": _LLAMA, "mamba": _MAMBA, "mamba2": _MAMBA2}
