"""The books of a run: what every rank held, sent and computed, beside what the formulas of `refpar/plan/` say of it.

A run that is equal but held the whole has failed: sharded means sharded.
"""
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from refpar.config import Layout
from refpar.oracle.run import Run, batches_of
from refpar.oracle.situation import Situation
from refpar.parallel.order import sliced, so_far, way_of
from refpar.parallel.placement import cut
from refpar.plan import flops, traffic
from refpar.plan.activations import Spot
from refpar.plan.passes import passes, slices_of, stores
from refpar.schedules.model import part_of_model


class Book(NamedTuple):
    """What one rank did in all steps together: elements held at most, bytes sent on each axis, operations."""
    weight: int
    saved: int
    left: int
    sent: dict[str, int]
    flops: int

    def entries(self) -> dict[str, int]:
        """Each number, by what it counts."""
        return {"elements of weights held": self.weight, "elements kept for backward": self.saved,
                "elements left for the weights' gradients": self.left,
                **{f"bytes sent on {axis}": size for axis, size in self.sent.items()}, "floating-point operations": self.flops}


class Books(NamedTuple):
    """Of all ranks.  Pairs are (counted, by formula)."""
    held: dict[str, tuple[float, float]]    # weight, saved -> the largest share of the single process's that a rank held
    sent: dict[str, tuple[int, int]]        # axis -> bytes
    flops: tuple[int, int]
    extra: dict[str, float]                 # term -> work beyond the single process's, as a share of all its work
    wrong: str | None                       # the first number that is not its formula's, in words


def books_of(situation: Situation, chain, wholes: list, runs: list[Run]) -> Books:
    """wholes: the ledgers of the single process, one a step; chain: its chain."""
    counted, promised = [counted_of(run) for run in runs], [promised_of(situation, chain, rank) for rank in range(len(runs))]
    whole = Book(sum(int(np.prod(situation.model.shape(text))) for group in chain.dims().values() for text in group.values()),
                 *(max(ledger.peak[kind] for ledger in wholes) for kind in ("saved", "products")), {},
                 sum(sum(ledger.flops.values()) for ledger in wholes))
    wrong = first_apart("the single process", whole, promised_of(alone(situation), chain, 0))
    for rank, pair in enumerate(zip(counted, promised)):
        wrong = wrong or first_apart(f"rank {rank}", *pair)
    axes = dict.fromkeys(axis for book in counted + promised for axis in book.sent) or ["dp"]
    return Books({kind: max((getattr(a, kind) / getattr(whole, kind), getattr(b, kind) / getattr(whole, kind))
                            for a, b in zip(counted, promised)) for kind in ("weight", "saved")},
                 {axis: (sum(book.sent.get(axis, 0) for book in counted), sum(book.sent.get(axis, 0) for book in promised))
                  for axis in axes},
                 (sum(book.flops for book in counted), sum(book.flops for book in promised)), extra_work(situation, whole.flops),
                 wrong)


def alone(situation: Situation) -> Situation:
    """The same on one rank, with all rows of a step in one batch."""
    return replace(situation, layout=Layout(), training=replace(situation.training, micro_batches=1))


def counted_of(run: Run) -> Book:
    """What the rank's ledger says."""
    sent: dict[str, int] = {}
    for (axis, _), (_, size) in run.sent.items():
        sent[axis] = sent.get(axis, 0) + size
    return Book(run.peak["weight"], run.peak["saved"], run.peak.get("products", 0),
                {axis: size for axis, size in sent.items() if size}, sum(run.flops.values()))


def promised_of(situation: Situation, chain, rank: int) -> Book:
    """What the formulas say of the rank.  chain: the whole model's."""
    model, layout, dtype = situation.model, situation.layout, np.dtype(situation.training.dtype)
    mesh, steps = traffic.mesh_of(layout, rank), steps_of(situation, rank)
    pp = mesh.coordinates()["pp"]
    mine = part_of_model(model, mesh, situation.training, chain)[0]
    params = shapes_of(model, mine, mesh, dtype)
    micros = situation.training.micro_batches
    spots = [[spot_of(situation, rank, piece) for piece in pieces] for pieces in steps]
    sizes = [[(spot.rows, spot.length, *spot.earlier) for spot in some] for some in spots]
    sent = [one for some in sizes for one in traffic.step(model, mesh, mine, params, some, dtype, micros)]
    kept = [store for some in spots for store in stores(model, layout, micros, pp, some)]
    return Book(sum(array.size for group in params.values() for array in group.values()),
                max((store.saved for store in kept), default=0), max((store.left for store in kept), default=0),
                traffic.by_axis(sent), sum(work_of(situation, rank).values()))


def shapes_of(model, chain, mesh, dtype) -> dict:
    """Arrays shaped like the rank's parameters, that take no memory."""
    return {layer: {name: np.broadcast_to(dtype.type(0), [piece.stop - piece.start for piece in cut(model, text, mesh)])
                    for name, text in group.items()} for layer, group in chain.dims().items()}


def steps_of(situation: Situation, rank: int) -> list[list]:
    """The rank's micro-batches of each step, or all slices of each."""
    mesh, slices = traffic.mesh_of(situation.layout, rank), slices_of(situation.layout, situation.training.micro_batches)
    way = way_of(situation.model, situation.layout)
    return [[piece for batch in batches_of(situation, mesh, number) for piece in sliced(batch, slices, way, mesh.axis("cp"))]
            for number in range(situation.training.steps)]


def work_of(situation: Situation, rank: int) -> flops.Work:
    """The rank's operations, by kind of layer and term, in all steps."""
    pp = traffic.mesh_of(situation.layout, rank).coordinates()["pp"]
    mine = passes(situation.model, situation.layout, situation.training.micro_batches, pp)
    return flops.added([flops.work(spot_of(situation, rank, batches[each.piece]), batches[each.piece], situation.training.dtype, each.kinds)
                        for batches in steps_of(situation, rank) for each in mine])


def spot_of(situation: Situation, rank: int, batch) -> Spot:
    """Where the rank stands, with one of its micro-batches."""
    where, (*earlier, whole) = traffic.mesh_of(situation.layout, rank).coordinates(), [rows.tokens.shape for rows in so_far(batch)]
    return Spot(situation.model, situation.layout, where["tp"], where["cp"], *whole, tuple(length for _, length in earlier))


def extra_work(situation: Situation, whole: int) -> dict[str, float]:
    """Term -> what all ranks together do beyond the single process, as a share of all that it does.  Below 0 where shorter pieces
    have less to do: chunks, blocks."""
    ranks = flops.added([work_of(situation, rank) for rank in range(situation.layout.ranks)])
    one = work_of(alone(situation), 0)
    return {term: (size - one[term]) / whole for term, size in ranks.items() if size != one[term]}


def first_apart(who: str, counted: Book, promised: Book) -> str | None:
    """The first number that is not its formula's, in words."""
    by_formula = promised.entries()
    for what, number in (dict.fromkeys(by_formula, 0) | counted.entries()).items():
        if number != by_formula.get(what, 0):
            return f"{who}: {what}: {number:,}, and by the formula {by_formula.get(what, 0):,}"
    return None
