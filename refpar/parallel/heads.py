"""Context parallelism of Mamba by heads: some tokens with all heads become all tokens with some heads, and back.

Ulysses' exchange (`parallel/ulysses.py`), for a conv and a scan: behind it each rank has whole rows, so nothing of the past is
missing and no state is passed on.  Whatever order the residual stream has, zig-zag too, the rows are put in their own: a
permutation of what a rank has, which sends nothing.

    Mamba-2, the seam `mix`     x, dt by heads, B, C by groups; y comes back
    Mamba-1, the seam `scan`    x, dt by channels, B, C whole by an all_gather, for they have no heads; y comes back.  Its conv
                                stands before the projections to B and C, at the tokens, and hands on its tail by a `carry`

Heads are cut in whole groups.  Where there are more ranks than groups, a run of ranks shares the heads of one, whose B and C go to
all of the run that have any, and the gradients from all of them are added.  Weights are sliced in forward, and their gradients
laid into zeros.  So is what lies before the rows and behind, for which nothing is sent: each rank reads and writes that of its own
heads, all ranks of a run the tails of its group's B and C.  Gradients of it are addends, zeros where a rank has no part.

Elements sent by rank i, where rank j has S_j tokens, and after the exchange m_j heads and g_j groups of this tp rank's:

    Mamba-2     forward     B S_i sum over j != i of (m_j (P+1) + 2 g_j N); and B m_i P sum over j != i of S_j, for y
                backward    B S_i sum m_j P, for dy; and B (m_i (P+1) + 2 g_i N) sum S_j
    Mamba-1     forward     B S_i sum 2 I_j; the all_gather of B S_j 2N; and B I_i sum S_j, for y
                backward    B S_i sum I_j, for dy; B 2 I_i sum S_j; and the reduce_scatter of B S_j 2N

with c-1 messages for each exchange.  They grow with the sequence; those of `parallel/state.py` do not.
Source: Megatron-LM's `mamba_context_parallel.py` for Mamba-2; Jacobs et al. 2023, "DeepSpeed Ulysses".
"""
from __future__ import annotations

import numpy as np

from refpar.comm.collectives import all_gather, reduce_scatter
from refpar.config import Model, share, shares
from refpar.nn import mamba1, mamba2
from refpar.nn.seams import ALONE, Pair
from refpar.nn.ssm import left_out
from refpar.parallel.order import columns, whole_of
from refpar.parallel.ulysses import head_parts, to_heads, to_tokens

TOKENS = 1              # the dim of tokens in [B, S, ...]


class Standing:
    """Where the tokens of a batch's rows stand, with `way` the order of the stream."""

    def __init__(self, cp, way: str, batch):
        held = [columns(way, whole_of(batch).tokens.shape[1], cp.size, rank) for rank in range(cp.size)]
        self.tokens, self.held = [len(some) for some in held], np.concatenate(held)
        self.natural, self.cp = np.argsort(self.held), cp

    def rows(self, arrays, cuts) -> list:
        """Arrays [B, S_i, C] of my tokens -> [B, S, my part of C], in the order of the rows.  One exchange."""
        return [x[:, self.natural] for x in to_heads(arrays, cuts, self.cp, self.tokens)]

    def stream(self, arrays, cuts, widths) -> list:
        """Back again, and the transpose; widths: of each C."""
        return to_tokens([x[:, self.held] for x in arrays], cuts, self.cp, self.tokens, widths)


def laid(part, index, like) -> np.ndarray:
    """`part` at its place in zeros of the shape of the whole."""
    whole = np.zeros_like(like)
    whole[index] = part
    return whole


# -------------------------------------------------------------------------------------------------------------- Mamba-2

class Cut:
    """One rank's heads, and their groups, as indices of everything that has heads or groups."""

    def __init__(self, config: Model, heads: slice, groups: slice):
        self.config, self.units = config, {"M": heads, "G": groups}
        self.dims = {name: dims for name, dims in mamba2.dims_of(config).items() if name in mamba2.MIX}
        self.states = {"conv_x": "B W MP", "conv_B": "B W GN", "conv_C": "B W GN", "state": "B M P N"}

    def along(self, word: str) -> slice:
        """My part of a dim: "MP/tp" -> the channels of my heads; all of a dim without heads."""
        part = self.units.get(word[0])
        unit = self.config.dim(word)[1] if part else 1
        return slice(part.start * unit, part.stop * unit) if part else slice(None)

    def index(self, dims: str) -> tuple[slice, ...]:
        """My part of an array: "W MP/tp"."""
        return tuple(self.along(word) for word in dims.split())

    def streams(self) -> tuple[slice, ...]:
        """Of the channels of x, B, C and dt."""
        return self.index("MP GN GN M")

    def sliced(self, tree: dict, dims: dict) -> dict:
        """My parts of named arrays."""
        return {name: tree[name][self.index(text)] for name, text in dims.items() if name in tree}

    def laid(self, parts: dict, dims: dict, like: dict) -> dict:
        """Named parts, each in zeros of the whole."""
        return {name: laid(part, self.index(dims[name]), like[name]) for name, part in parts.items()}


def cuts_of(config: Model, heads: int, groups: int, ranks: int) -> list[Cut]:
    """The cut of each rank, of so many heads and groups: those of this rank's share of tp."""
    return [Cut(config, *parts) for parts in head_parts(heads, groups, ranks)]


def by_heads(config: Model, cp, way: str) -> Pair:
    """The filling of `mix`, for a stream whose tokens lie in the order `way`."""
    mixing = mamba2.mix(config, ALONE, mamba2.chunked(config.chunk, ALONE))
    idle = mamba2.mix(config, ALONE, left_out())                    # of a rank without heads

    def cut(w):
        """Everybody's streams, my cut, and what I do with it."""
        cuts = cuts_of(config, len(w["A_log"]), w["conv_B"].shape[1] // config.state, cp.size)
        mine = cuts[cp.index]
        busy = mine.units["M"].stop > mine.units["M"].start and not config.cut
        return [each.streams() for each in cuts], mine, mixing if busy else idle

    def forward(x, B, C, dt, w, batch, before):
        streams, mine, inner = cut(w)
        standing = Standing(cp, way, batch)
        some = standing.rows([x, B, C, dt], streams)
        y, after, saved = inner.forward(*some, mine.sliced(w, mine.dims), batch.whole, mine.sliced(before, mine.states))
        y, = standing.stream([y], [(each[0],) for each in streams], [x.shape[2]])
        return y, mine.laid(after, mine.states, before), saved

    def backward(dy, dafter, saved, w, batch):
        streams, mine, inner = cut(w)
        standing = Standing(cp, way, batch)
        some, = standing.rows([dy], [(each[0],) for each in streams])
        after = mine.sliced(dafter, mine.states)
        inputs, dbefore, grads = inner.backward(some, after, saved, mine.sliced(w, mine.dims), batch.whole)
        widths = [w[name].shape[1] for name in ("conv_x", "conv_B", "conv_C")] + [len(w["A_log"])]
        inputs = standing.stream(inputs, streams, widths)
        return tuple(inputs), mine.laid(dbefore, mine.states, dafter), mine.laid(grads, mine.dims, w)

    return Pair(forward, backward)


# -------------------------------------------------------------------------------------------------------------- Mamba-1

def by_channels(config: Model, cp) -> Pair:
    """The filling of Mamba-1's `scan`; its tokens, which a conv has seen, lie in runs."""
    scan = left_out() if config.cut else mamba1.chunked(ALONE)

    def cut(channels, batch):
        """How many tokens each rank has; everybody's channels, and mine."""
        parts = [share(channels, cp.size, rank) for rank in range(cp.size)]
        return shares(whole_of(batch).tokens.shape[1], cp.size), parts, parts[cp.index]

    def forward(x, dt, B, C, A_log, batch, before):
        tokens, parts, mine = cut(x.shape[2], batch)
        some = to_heads([x, dt], [(part, part) for part in parts], cp, tokens)
        shared = all_gather(np.concatenate([B, C], axis=2), cp, TOKENS, tokens)
        B, C = (np.ascontiguousarray(half) for half in np.split(shared, 2, axis=2))     # of whole rows
        y, after, saved = scan.forward(*some, B, C, A_log[mine], batch.whole, before[..., mine])
        y, = to_tokens([y], [(part,) for part in parts], cp, tokens, [x.shape[2]])
        return y, laid(after, (..., mine), before), saved

    def backward(dy, dafter, saved, A_log, batch):
        tokens, parts, mine = cut(dy.shape[2], batch)
        some, = to_heads([dy], [(part,) for part in parts], cp, tokens)
        (dx, ddt, dB, dC), dbefore, dA_log = scan.backward(some, dafter[..., mine], saved, A_log[mine], batch.whole)
        dx, ddt = to_tokens([dx, ddt], [(part, part) for part in parts], cp, tokens, [dy.shape[2]] * 2)
        shared = reduce_scatter(np.concatenate([dB, dC], axis=2), cp, TOKENS, tokens)
        return (dx, ddt, *np.split(shared, 2, axis=2)), laid(dbefore, (..., mine), dafter), laid(dA_log, mine, A_log)

    return Pair(forward, backward)
