"""The layers of a Transformer but its MLP: embedding, attention, norm, head; Llama's (Touvron et al. 2023), GPT-2's and others'.

Attention is what stands inside the norm; `nn/residual.py` puts it on the residual stream.  Sizes are read off the weights: where
these are a rank's shard (some heads, some words), y is an addend of the whole, and `leave` completes it.
"""
from __future__ import annotations

from refpar.config import Model
from refpar.nn import attention, blocks
from refpar.nn.ops import (embedding_backward, embedding_forward, linear_backward, linear_forward, matmul, softcap_backward,
                           softcap_forward, summed)
from refpar.nn.pieces import PASSED, norm_of, rms_norm
from refpar.nn.product import Product
from refpar.nn.projection import INTO, OUT_OF
from refpar.nn.rope import rotary
from refpar.nn.seams import Layer, Seams

QKV = {"q": "D HE/tp", "k": "D KE/tp", "v": "D KE/tp"}


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
    into, out_of = seams.into or INTO, seams.out_of or OUT_OF
    turns_of, rope = rotary(config)
    biases = {} if config.attention_bias == "none" else {name: f"{name}_bias" for name in QKV}
    normed = {name: rms_norm(f"{name}_norm", "E", config.norm_eps) if config.qk_norm else PASSED for name in "qk"}

    def forward(x, w, batch, before):
        turn, heads, saved = turns_of(batch.position, x.dtype), {}, {}
        ys, saved["into"] = into.forward(x, {name: w[name] for name in QKV}, batch)
        for name, y in ys.items():
            y = y + w[biases[name]] if biases else y                                # [B, S, HE/tp] or [B, S, KE/tp]
            heads[name] = heads_of(y, width)
        for name in "qk":
            y, saved[f"{name}_norm"] = normed[name].forward(heads[name], w)         # [B, S, H/tp, E] or [B, S, K/tp, E]
            heads[name] = rope.forward(y, turn)
        out, after, saved["core"] = core.forward(*heads.values(), batch, before)    # [B, S, H/tp, E]
        y, saved["out_of"] = out_of.forward(joined(out), w["o"], batch)             # [B, S, D] +tp
        return y, after, saved

    def backward(dy, dafter, saved, w, batch):
        turn, grads = turns_of(batch.position, dy.dtype), {}
        dout, grads["o"] = out_of.backward(dy, saved["out_of"], w["o"], batch)      # [B, S, HE/tp]
        *dheads, dbefore = core.backward(heads_of(dout, width), dafter, saved["core"], batch)
        dheads = dict(zip(QKV, dheads))
        for name in "qk":
            dheads[name], some = normed[name].backward(rope.backward(dheads[name], turn), saved[f"{name}_norm"], w)
            grads |= some
        dys = {name: joined(dhead) for name, dhead in dheads.items()}
        dx, products = into.backward(dys, saved["into"], {name: w[name] for name in QKV}, batch)    # [B, S, D] +tp
        return dx, dbefore, grads | products | {bias: summed(dys[name]) for name, bias in biases.items()}

    def start(w, batch):
        return attention.start(batch, w["k"].shape[1] // width, width, w["k"].dtype)

    inside = QKV | {bias: QKV[name].split()[1] for name, bias in biases.items()} | {"o": "HE/tp D"}
    return Layer(forward, backward, inside | normed["q"].dims | normed["k"].dims,
                 {"o_bias": "D"} if config.attention_bias == "all" else {}, start)


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
