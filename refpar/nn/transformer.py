"""The layers of a Transformer but its MLP: embedding, attention, norm, head; Llama's (Touvron et al. 2023), GPT-2's and others'.

Attention is what stands inside the norm; `nn/residual.py` puts it on the residual stream.  Sizes are read off the weights: where
these are a rank's shard (some heads, some words), y is an addend of the whole, and `leave` completes it.
"""
from __future__ import annotations

import numpy as np

from refpar.config import Model
from refpar.nn import attention, blocks
from refpar.nn.ops import (embedding_backward, embedding_forward, linear_backward, linear_forward, matmul, softcap_backward,
                           softcap_forward)
from refpar.nn.pieces import PASSED, Piece, linear, norm_of, rms_norm, with_bias
from refpar.nn.product import Product
from refpar.nn.rope import rotary
from refpar.nn.seams import Layer, Seams


def heads_of(x, width: int):
    """x [B, S, HE] -> [B, S, H, E], a view."""
    return x.reshape(*x.shape[:2], x.shape[2] // width, width)


def joined(x):
    """x [B, S, H, E] -> [B, S, HE], a view."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def attention_layer(config: Model, seams: Seams) -> Layer:
    """Causal self-attention within documents, H query heads on K key/value heads.

    Queries and keys may be normed, head by head with one weight for all heads, and are then turned by their positions.  Biases of
    q, k and v stand inside the seams; o_bias stands outside, where `nn/residual.py` adds it once.
    """
    width, core = config.head_width, seams.core or blocks.core(window=config.reach)
    turns_of, rope = rotary(config)
    project, out_of = projections(config), linear("o", "HE/tp D")
    normed = {name: rms_norm(f"{name}_norm", "E", config.norm_eps) if config.qk_norm else PASSED for name in "qk"}

    def forward(x, w, batch, before):
        turn, heads, saved = turns_of(batch.position, x.dtype), {}, {}
        for name in "qkv":
            y, saved[name] = project[name].forward(x, w)                            # [B, S, HE/tp] or [B, S, KE/tp]
            heads[name] = heads_of(y, width)
        for name in "qk":
            y, saved[f"{name}_norm"] = normed[name].forward(heads[name], w)         # [B, S, H/tp, E] or [B, S, K/tp, E]
            heads[name] = rope.forward(y, turn)
        out, after, saved["core"] = core.forward(*heads.values(), batch, before)    # [B, S, H/tp, E]
        y, saved["o"] = out_of.forward(joined(out), w)                              # [B, S, D] +tp
        return y, after, saved

    def backward(dy, dafter, saved, w, batch):
        turn = turns_of(batch.position, dy.dtype)
        dout, grads = out_of.backward(dy, saved["o"], w)                            # [B, S, HE/tp]
        *dheads, dbefore = core.backward(heads_of(dout, width), dafter, saved["core"], batch)
        dheads = dict(zip("qkv", dheads))
        for name in "qk":
            dheads[name], some = normed[name].backward(rope.backward(dheads[name], turn), saved[f"{name}_norm"], w)
            grads |= some
        dx = np.zeros_like(saved["q"]["x"])                                         # [B, S, D] +tp
        for name in "qkv":
            part, some = project[name].backward(joined(dheads[name]), saved[name], w)
            dx += part
            grads |= some
        return dx, dbefore, grads

    def start(w, batch):
        return attention.start(batch, w["k"].shape[1] // width, width, w["k"].dtype)

    pieces = *project.values(), *normed.values(), out_of
    return Layer(forward, backward, {name: dims for piece in pieces for name, dims in piece.dims.items()},
                 {"o_bias": "D"} if config.attention_bias == "all" else {}, start)


def projections(config: Model) -> dict[str, Piece]:
    """q, k and v, each with its bias where the model has them."""
    cut = {"q": "HE/tp", "k": "KE/tp", "v": "KE/tp"}
    plain = {name: linear(name, f"D {words}") for name, words in cut.items()}
    if config.attention_bias == "none":
        return plain
    return {name: with_bias(piece, f"{name}_bias", cut[name]) for name, piece in plain.items()}


def embedding_layer(config: Model, seams: Seams) -> Layer:
    """Tokens to vectors, and learned positions where the model has them.  Its input is the tokens, so it has no input gradient.

    The positions' table stands outside the seams, where the vectors are whole, and is added once.
    """
    learned = {"position": "X D"} if config.positions == "learned" else {}

    def forward(tokens, w, batch, before):
        x = seams.leave.forward(embedding_forward(tokens, w["table"], seams.first), batch)      # [B, S, D]
        here = seams.mine(batch)
        for name in learned:
            x = x + w[name][here.position]
        return seams.drop.forward(x, here), None, {"tokens": tokens}

    def backward(dy, dafter, saved, w, batch):
        here = seams.mine(batch)
        dx = seams.drop.backward(dy, here)
        grads = {name: embedding_backward(dx, here.position, w[name]) for name in learned}
        dx = seams.leave.backward(dx, batch)
        return None, None, grads | {"table": embedding_backward(dx, saved["tokens"], w["table"], seams.first)}

    return Layer(forward, backward, {"table": "V/tp D"}, learned)


def norm_layer(config: Model, seams: Seams) -> Layer:
    """The last norm."""
    norm = norm_of(config)

    def forward(x, w, batch, before):
        y, saved = norm.forward(x, w)                                               # [B, S, D]
        return y, None, saved

    def backward(dy, dafter, saved, w, batch):
        dx, grads = norm.backward(dy, saved, w)
        return dx, None, grads

    return Layer(forward, backward, {}, norm.dims)


def head_layer(config: Model, seams: Seams) -> Layer:
    """Vectors to logits, with a weight of its own."""
    def forward(x, w, batch, before):
        logits, saved = linear_forward(seams.enter.forward(x, batch), w["head"])           # [B, S, V/tp]
        return logits, None, saved

    def backward(dlogits, dafter, saved, w, batch):
        dx, dw = linear_backward(dlogits, saved, w["head"])                         # [B, S, D] +tp
        return seams.enter.backward(dx, batch), None, {"head": dw}

    return Layer(forward, backward, {"head": "D V/tp"}, {})


def tied_head_layer(config: Model, seams: Seams) -> Layer:
    """Vectors to logits by the embedding's table, borrowed (Press and Wolf 2017)."""
    def forward(x, w, batch, before):
        h = seams.enter.forward(x, batch)                                                  # [B, S, D]
        return matmul(h, w["table"].T, "linear"), None, {"x": h}                    # [B, S, V/tp]

    def backward(dlogits, dafter, saved, w, batch):
        dx = matmul(dlogits, w["table"], "input gradient")                          # [B, S, D] +tp
        return seams.enter.backward(dx, batch), None, {"table": Product(dlogits, saved["x"])}

    return Layer(forward, backward, {"table": "V/tp D"}, {})


def capped(head: Layer, cap: float) -> Layer:
    """The head, its logits softly capped, each by itself: a part of the vocabulary is as good as the whole."""
    def forward(x, w, batch, before):
        logits, after, saved = head.forward(x, w, batch, before)                    # [B, S, V/tp]
        logits, cap_saved = softcap_forward(logits, cap)
        return logits, after, {"head": saved, "cap": cap_saved}

    def backward(dlogits, dafter, saved, w, batch):
        return head.backward(softcap_backward(dlogits, saved["cap"], cap), dafter, saved["head"], w, batch)

    return head._replace(forward=forward, backward=backward)
