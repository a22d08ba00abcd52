"""What is true of a Mamba layer cut over context-parallel ranks, by every option.  A property raises one sentence, or returns.

The ranks run a layer whose seams are filled, with their tokens; the single process, outside the world, runs it alone, and judges.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.mesh import Axis
from refpar.nn.mamba1 import mamba1_layer
from refpar.nn.mamba2 import mamba2_layer
from refpar.nn.product import settle
from refpar.nn.seams import Layer, Seams
from refpar.oracle.properties_comm import require
from refpar.oracle.properties_nn import alike
from refpar.oracle.situation_state import StateSituation
from refpar.parallel.heads import cuts_of
from refpar.parallel.mamba import in_runs, mamba_seams, reorders
from refpar.parallel.order import columns, part_of
from refpar.plan.volume_state import StateCut, state_volume

LAYERS = {"mamba1": mamba1_layer, "mamba2": mamba2_layer}


class Told(NamedTuple):
    """What a layer made, and what its rank sent: (messages, bytes) forward and backward."""
    out: np.ndarray
    dx: np.ndarray
    after: dict
    before: dict
    grads: dict
    sent: tuple[tuple[int, int], tuple[int, int]]


def run_rank(wire, situation: StateSituation, changed=None) -> Told:
    """The program of one rank: fill the seams, cut what it holds, go down and up."""
    s, cp = situation, Axis("cp", tuple(range(wire.size)), wire.rank, wire, situation.node)
    layer = LAYERS[s.kind](s.model, Seams(**mamba_seams(s.model, s.kind, cp, s.option, s.way)))
    if reorders(s.kind, s.option, s.way):
        layer = in_runs(layer, cp, s.way)
    mine = columns(s.way, s.length, cp.size, cp.index)
    return run(layer, s, part_of(s.batch(), s.way, cp), mine, changed, alike_before(s, cp.index))


def alike_before(situation: StateSituation, rank: int) -> tuple[str, ...]:
    """The states that a rank before this one has too, by heads: tails of B and C, of a group that they share.  The gradient of
    what lies behind the rows is given to the first."""
    cuts = cuts_of(situation.model, situation.heads, situation.groups, situation.ranks)
    groups = [cut.units["G"] for cut in cuts]
    shared = groups[rank] in groups[:rank] and (situation.kind, situation.option) == ("mamba2", "heads")
    return ("conv_B", "conv_C") if shared else ()


def run(layer: Layer, situation: StateSituation, batch, mine, changed=None, unread=()) -> Told:
    """The layer with the columns `mine` of the rows.  changed [B, S]: where inputs are others; unread: states that have no
    gradient from behind."""
    w = situation.weights(layer.dims)
    x, dy = situation.drawn(1, changed)[:, mine], situation.drawn(2)[:, mine] * (batch.position >= 0)[..., None]
    with watch.watching(watch.Ledger()) as forward:
        out, after, saved = layer.forward(x, w, batch, situation.past(layer.start(w, batch), 3))
    with watch.watching(watch.Ledger()) as backward:
        future = situation.past(layer.start(w, batch), 4)
        future |= {name: np.zeros_like(future[name]) for name in unread}
        dx, before, grads = layer.backward(dy, future, saved, w, batch)
    return Told(out, dx, after, before, settle(grads), (forward.sent(), backward.sent()))


def alone(situation: StateSituation) -> Told:
    """The single process."""
    return run(LAYERS[situation.kind](situation.model, Seams()), situation, situation.batch(), slice(None))


def in_rows(situation: StateSituation, shards: list) -> np.ndarray:
    """All ranks' tokens, back in the order of the rows."""
    held = np.concatenate([columns(situation.way, situation.length, situation.ranks, rank) for rank in range(situation.ranks)])
    return np.concatenate(shards, axis=1)[:, np.argsort(held)]


def nest(told: Told) -> dict:
    """By name; what is made of one another stands under one name, and has one scale."""
    return {"out": told.out, "dx": told.dx, "after": {"it": told.after}, "before": {"it": told.before}, "gradient": {"it": told.grads}}


def unsharded(situation: StateSituation, tells: list[Told]) -> Told:
    """What all ranks made together.  Handed on by summaries, states are the same on all of them, bitwise."""
    added = {field: {name: sum(getattr(told, field)[name] for told in tells) for name in getattr(tells[0], field)}
             for field in ("after", "before", "grads")}
    if situation.option != "heads":
        for rank, told in enumerate(tells):
            for name in told.after:
                same = (np.array_equal(told.after[name], tells[0].after[name])
                        and np.array_equal(told.before[name], tells[0].before[name]))
                require(same, f"{name} behind the rows, or its gradient before them, is not the same on ranks 0 and {rank}, in {situation}")
        added |= {"after": tells[0].after, "before": tells[0].before}
    elif situation.kind == "mamba2":
        added["after"] = {name: np.zeros_like(array) for name, array in tells[0].after.items()}
        for told, cut in zip(tells, cuts_of(situation.model, situation.heads, situation.groups, situation.ranks)):
            for name, part in cut.sliced(told.after, cut.states).items():               # a run's ranks have the same tails of B and C
                added["after"][name][cut.index(cut.states[name])] = part
    else:
        added["after"]["conv"], added["before"]["conv"] = tells[0].after["conv"], tells[0].before["conv"]
    return Told(in_rows(situation, [told.out for told in tells]), in_rows(situation, [told.dx for told in tells]), **added, sent=())


def context_state(world, situation: StateSituation):
    """A Mamba layer over context-parallel ranks is that layer: outputs, dx, what lies behind the rows, and the gradients of what
    lies before them and of every parameter (summed over ranks) equal the single process's; and inputs of one document that are
    changed move nothing, bitwise, of another, on whatever rank."""
    tells, expected = world.run(run_rank, situation.ranks, situation), alone(situation)
    got, model = unsharded(situation, tells), situation.model
    n = max(1, situation.rows * situation.length, model.width, model.ssm_heads * model.ssm_head_width * model.state)
    alike(nest(got), nest(expected), n, str(situation))
    for told in tells:
        for name, grad in told.grads.items():
            require(grad.dtype == expected.grads[name].dtype, f"the gradient of {name} is {grad.dtype}, in {situation}")
    _documents_apart(world, situation, got)


def _documents_apart(world, situation: StateSituation, was: Told):
    """Change the inputs of one document of one row: no token of another moves.  (A pad has an output, of the state before it.)"""
    if not was.out.size:
        return
    rng, batch = np.random.default_rng([situation.seed, 11]), situation.batch()
    row, column = int(rng.integers(situation.rows)), int(rng.integers(situation.length))
    inside = batch.document == batch.document[row, column]
    inside[np.arange(situation.rows) != row] = False                                    # [B, S]
    tells = world.run(run_rank, situation.ranks, situation, inside)
    for name in ("out", "dx"):
        moved = (in_rows(situation, [getattr(told, name) for told in tells]) != getattr(was, name)).any(axis=2)
        wrong = np.argwhere(moved & ~inside & (batch.position >= 0))
        require(not len(wrong), f"inputs of the document at column {column} of row {row} are changed, and {name} moves at row and "
                                f"column {wrong[:1].tolist()}, in {situation}")


def context_state_counts(world, situation: StateSituation):
    """Messages and bytes that each rank sends, forward and backward, are what the formulas say."""
    s = situation
    cut = StateCut(s.model, s.kind, s.option, s.way, s.ranks, s.rows, s.length, np.dtype(s.dtype).itemsize, s.node)
    for rank, told in enumerate(world.run(run_rank, s.ranks, s)):
        for way, counted, promised in zip(("forward", "backward"), told.sent, state_volume(rank, cut)):
            require(counted == (promised.messages, promised.elements),
                    f"rank {rank} sends {counted} (messages, bytes) {way}, and the formula is "
                    f"{(promised.messages, promised.elements)}, in {s}")
