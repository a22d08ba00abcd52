"""The layers of a Llama-like Transformer (Touvron et al. 2023): embedding, attention, SwiGLU MLP, norm, head.

Attention and MLP are what stands inside the norm; `nn/residual.py` puts them on the residual stream.  Sizes are read off the
weights: where these are a rank's shard (some heads, some of F, some words), y is an addend of the whole, and `leave` completes it.
"""
from __future__ import annotations

from refpar.config import Model
from refpar.nn import attention, blocks
from refpar.nn.ops import (embedding_backward, embedding_forward, linear_backward, linear_forward, matmul, rmsnorm_backward,
                           rmsnorm_forward, stacked_backward, stacked_forward, swiglu_backward, swiglu_forward)
from refpar.nn.product import Product
from refpar.nn.rope import rope_backward, rope_forward, turns
from refpar.nn.seams import Layer, Seams


def heads_of(x, width: int):
    """x [B, S, HE] -> [B, S, H, E], a view."""
    return x.reshape(*x.shape[:2], x.shape[2] // width, width)


def joined(x):
    """x [B, S, H, E] -> [B, S, HE], a view."""
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])


def attention_layer(config: Model, seams: Seams) -> Layer:
    """Causal self-attention within documents, rotary positions, H query heads on K key/value heads."""
    width, core = config.head_width, seams.core or blocks.core()

    def forward(x, w, batch, before):
        turn = turns(batch.position, width, config.rope_base, x.dtype)
        q, q_saved = linear_forward(x, w["q"])                                      # [B, S, HE/tp]
        k, k_saved = linear_forward(x, w["k"])                                      # [B, S, KE/tp]
        v, v_saved = linear_forward(x, w["v"])                                      # [B, S, KE/tp]
        q, k = rope_forward(heads_of(q, width), turn), rope_forward(heads_of(k, width), turn)
        out, after, core_saved = core.forward(q, k, heads_of(v, width), batch, before)      # [B, S, H/tp, E]
        y, o_saved = linear_forward(joined(out), w["o"])                            # [B, S, D] +tp
        return y, after, {"q": q_saved, "k": k_saved, "v": v_saved, "core": core_saved, "o": o_saved}

    def backward(dy, dafter, saved, w, batch):
        turn = turns(batch.position, width, config.rope_base, dy.dtype)
        dout, dw_o = linear_backward(dy, saved["o"], w["o"])                        # [B, S, HE/tp]
        dq, dk, dv, dbefore = core.backward(heads_of(dout, width), dafter, saved["core"], batch)
        dq, dk = joined(rope_backward(dq, turn)), joined(rope_backward(dk, turn))
        dx, dw_q = linear_backward(dq, saved["q"], w["q"])                          # [B, S, D] +tp
        dx_k, dw_k = linear_backward(dk, saved["k"], w["k"])
        dx_v, dw_v = linear_backward(joined(dv), saved["v"], w["v"])
        dx += dx_k
        dx += dx_v
        return dx, dbefore, {"q": dw_q, "k": dw_k, "v": dw_v, "o": dw_o}

    def start(w, batch):
        return attention.start(batch, w["k"].shape[1] // width, width, w["k"].dtype)

    return Layer(forward, backward, {"q": "D HE/tp", "k": "D KE/tp", "v": "D KE/tp", "o": "HE/tp D"}, {}, start)


def mlp_layer(config: Model, seams: Seams) -> Layer:
    """silu(x gate) * (x up), times down; gate and up are one stacked weight."""
    def forward(x, w, batch, before):
        h, up = stacked_forward(x, w["gate_up"])                                    # [2, B, S, F/tp]
        a, act = swiglu_forward(h)                                                  # [B, S, F/tp]
        y, down = linear_forward(a, w["down"])                                      # [B, S, D] +tp
        return y, None, {"gate_up": up, "act": act, "down": down}

    def backward(dy, dafter, saved, w, batch):
        da, dw_down = linear_backward(dy, saved["down"], w["down"])                 # [B, S, F/tp]
        dh = swiglu_backward(da, saved["act"])                                      # [2, B, S, F/tp]
        dx, dw_gate_up = stacked_backward(dh, saved["gate_up"], w["gate_up"])       # [B, S, D] +tp
        return dx, None, {"gate_up": dw_gate_up, "down": dw_down}

    return Layer(forward, backward, {"gate_up": "2 D F/tp", "down": "F/tp D"}, {})


def embedding_layer(config: Model, seams: Seams) -> Layer:
    """Tokens to vectors.  Its input is the tokens, so it has no input gradient."""
    def forward(tokens, w, batch, before):
        x = embedding_forward(tokens, w["table"], seams.first)                      # [B, S, D] +tp
        return seams.drop.forward(seams.leave.forward(x), batch), None, {"tokens": tokens}

    def backward(dy, dafter, saved, w, batch):
        dx = seams.leave.backward(seams.drop.backward(dy, batch))
        return None, None, {"table": embedding_backward(dx, saved["tokens"], w["table"], seams.first)}

    return Layer(forward, backward, {"table": "V/tp D"}, {})


def norm_layer(config: Model, seams: Seams) -> Layer:
    """The last norm."""
    def forward(x, w, batch, before):
        y, saved = rmsnorm_forward(x, w["norm"], config.norm_eps)                   # [B, S, D]
        return y, None, saved

    def backward(dy, dafter, saved, w, batch):
        dx, dnorm = rmsnorm_backward(dy, saved, w["norm"])
        return dx, None, {"norm": dnorm}

    return Layer(forward, backward, {}, {"norm": "D"})


def head_layer(config: Model, seams: Seams) -> Layer:
    """Vectors to logits, with a weight of its own."""
    def forward(x, w, batch, before):
        logits, saved = linear_forward(seams.enter.forward(x), w["head"])           # [B, S, V/tp]
        return logits, None, saved

    def backward(dlogits, dafter, saved, w, batch):
        dx, dw = linear_backward(dlogits, saved, w["head"])                         # [B, S, D] +tp
        return seams.enter.backward(dx), None, {"head": dw}

    return Layer(forward, backward, {"head": "D V/tp"}, {})


def tied_head_layer(config: Model, seams: Seams) -> Layer:
    """Vectors to logits by the embedding's table, borrowed (Press and Wolf 2017)."""
    def forward(x, w, batch, before):
        h = seams.enter.forward(x)                                                  # [B, S, D]
        return matmul(h, w["table"].T, "linear"), None, {"x": h}                    # [B, S, V/tp]

    def backward(dlogits, dafter, saved, w, batch):
        dx = matmul(dlogits, w["table"], "input gradient")                          # [B, S, D] +tp
        return seams.enter.backward(dx), None, {"table": Product(dlogits, saved["x"])}

    return Layer(forward, backward, {"table": "V/tp D"}, {})
