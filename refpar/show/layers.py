"""What one layer sends on a mesh, forward and backward: it is run on a short row, and a ledger listens.

The collectives are those that fill the layer's seams (`parallel/fill.py`).  Gradients of weights are summed over ranks once a step,
after all layers, and are not shown.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from refpar import corpus, watch
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import Layout, Model
from refpar.nn.gradient import zeros_like
from refpar.nn.init import initial
from refpar.oracle.packed import packed
from refpar.parallel import fill
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut

LAYERS = ("embedding", "attention", "mlp", "mamba1", "mamba2", "head", "loss")
MODELS = {"mamba1": "mamba1-tiny", "mamba2": "mamba2-tiny"}         # where no model is named; else llama-tiny
ROWS, TOKENS, DTYPE = 2, 64, "float32"


def check(model: Model, layout: Layout, kind: str):
    """ValueError where the model has no such layer, or the mesh cuts what is not drawn."""
    if kind in ("attention", "mlp", "mamba1", "mamba2") and kind not in model.pattern:
        raise ValueError(f"there is no {kind} in a model whose pattern is {'+'.join(model.pattern)}")
    if layout.pp > 1:
        raise ValueError(f"mesh {layout} has pp={layout.pp}, and a layer stands on one stage: leave pp out")
    model.require_positions(TOKENS, f"the row of {TOKENS} tokens that is drawn")


class Calls(watch.Ledger):
    """The ledger, and how often each collective was called."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def began(self, axis, operation):
        self.calls[axis, operation] += 1


def program(wire, model: Model, layout: Layout, kind: str) -> dict[str, Calls]:
    """One rank's part: the layer, down and up."""
    mesh = Mesh(layout, wire)
    chain = fill.model(model, mesh)
    params = initial(model, chain, 0, np.dtype(DTYPE), cut=lambda name, dims: cut(model, dims, mesh))
    rows = corpus.micro_batches(ROWS * layout.dp, layout.dp, mesh.axis("dp").index, 1)[0]
    whole = packed(0, ROWS * layout.dp, TOKENS, model.vocab).cut(rows)
    batch = part_of(whole, way_of(model, layout), mesh.axis("cp"))
    here = fill.tokens_here(mesh)(batch).tokens
    if kind == "loss":
        words = cut(model, "V/tp", mesh)[0]
        return heard(lambda: chain.loss.forward(np.zeros((*batch.tokens.shape, words.stop - words.start), DTYPE), batch.targets),
                     lambda made: chain.loss.backward(1.0, made[1]))
    name, layer = next(found for found in chain.layers if found[0].partition(".")[2] == kind)
    x = here if kind == "embedding" else np.ones((*here.shape, model.width), DTYPE)
    x, w = batch.tokens if kind == "embedding" else x, chain.weights(params, name)
    return heard(lambda: layer.forward(x, w, batch, layer.start(w, batch)),
                 lambda made: layer.backward(np.ones_like(made[0]), zeros_like(made[1]), made[2], w, batch))


def heard(forward, backward) -> dict[str, Calls]:
    """Forward, and backward of what it made, each with its ledger."""
    with watch.watching(Calls()) as down:
        made = forward()
    with watch.watching(Calls()) as up:
        backward(made)
    return {"forward": down, "backward": up}


def describe(model: Model, layout: Layout, kind: str) -> dict:
    """What each rank sent, way by way and collective by collective, for a program to read."""
    ranks, found = ThreadWorld().run(program, layout.ranks, replace(model, blocks=1), layout, kind), []
    for way in ("forward", "backward"):
        names = {name: None for rank in ranks for name in rank[way].calls}
        for axis, operation in names:
            messages, sizes = zip(*(rank[way].sent(axis, operation) for rank in ranks))
            if any(messages):                                           # an axis of one rank is called, and sends nothing
                found.append({"way": way, "axis": axis, "collective": operation,
                              "calls": max(rank[way].calls[axis, operation] for rank in ranks),
                              "messages": list(messages), "bytes": list(sizes)})
    return {"layer": kind, "mesh": f"{layout}{', sp' * layout.sp}",
            "rows": ROWS, "tokens": TOKENS, "dtype": DTYPE, "width": model.width, "sent": found}


def draw(told: dict) -> str:
    """A line for each collective of each way, and the bytes of each rank."""
    rows, tokens, width = told["rows"], told["tokens"], told["width"]
    size = rows * tokens * width * np.dtype(told["dtype"]).itemsize
    lines = [f"{told['layer']} on mesh {told['mesh']}: what each rank sends for {rows} rows of {tokens} tokens on each dp rank",
             f"the stream of these rows is [{rows}, {tokens}, {width}] of {told['dtype']}: {size:,} bytes", "",
             f"  {'':<10}{'axis':<6}{'collective':<20}{'calls':>6}{'messages':>12}{'bytes':>18}"]
    was = ""
    for row in told["sent"]:
        lines.append(f"  {row['way'] if row['way'] != was else '':<10}{row['axis']:<6}{row['collective']:<20}{row['calls']:>6}"
                     f"{spread(row['messages']):>12}{spread(row['bytes']):>18}")
        was = row["way"]
    for way in ("forward", "backward"):
        if way not in {row["way"] for row in told["sent"]}:
            lines.append(f"  {way}: nothing is sent")
    return "\n".join(lines)


def spread(counts: list[int]) -> str:
    """ "512", or "512-768" where ranks differ."""
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,}-{max(counts):,}"
