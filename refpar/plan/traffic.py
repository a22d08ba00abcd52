"""What a training step sends, message by message: which layer, on which axis, how many bytes.

One function for each kind of layer lists its collectives in forward and backward order, of one micro-batch on one rank; the sums
around the layers (counts, losses, gradients, norms) are listed once a step.  What a collective of that size sends there is its
algorithm's formula (`promise.py`).

Letters: b rows, S the rank's tokens of a row inside the layers, d bytes an element.  With p ranks on tp and long messages

    layer       tp                              sp                                  of its own
    each        2 all_reduce of b S D           2 all_gather, 2 reduce_scatter
    embedding   1 all_reduce                    1 reduce_scatter, 1 all_gather
    head        1 all_reduce                    1 all_gather, 1 reduce_scatter
    mamba1                                                                          2 all_reduce of b S (R + 2 N)
    mamba2                                                                          2 all_reduce of b S a group, where ranks share it
    loss                                                                            all_reduce of b S, and of 2 b S
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np

from refpar.comm.choose import Task
from refpar.comm.mesh import Mesh
from refpar.config import Model, shares
from refpar.parallel.data import buckets
from refpar.parallel.mamba import reorders
from refpar.parallel.order import way_of
from refpar.parallel.tensor import linked
from refpar.plan.activations import STATE, Spot, again, groups_of
from refpar.plan import volume
from refpar.plan.passes import Pass, passes
from refpar.plan.promise import promised
from refpar.plan.volume_cp import Cut, context_volume
from refpar.plan.volume_state import StateCut, state_volume


class Sent(NamedTuple):
    """What one collective, or the collectives of one purpose, send on a rank."""
    what: str
    axis: str
    bytes: int
    forward: bool = True        # or backward


class Place(NamedTuple):
    """A rank that sends nothing: enough of a wire for a mesh to say where it stands."""
    rank: int
    size: int


class Here(NamedTuple):
    """One micro-batch on one rank."""
    model: Model
    mesh: Mesh
    rows: int
    length: int                 # of whole rows, or of a slice of them
    dtype: np.dtype
    earlier: tuple[int, ...] = ()       # lengths of the slices before it

    @property
    def spot(self) -> Spot:
        """Where the rank stands, for its shares."""
        where = self.mesh.coordinates()
        return Spot(self.model, self.mesh.layout, where["tp"], where["cp"], self.rows, self.length, self.earlier)

    @property
    def tokens(self) -> int:
        """Those of the rank inside the layers."""
        return self.rows * self.spot.columns


def mesh_of(layout, rank: int) -> Mesh:
    """The mesh as a rank sees it, to ask and not to send."""
    return Mesh(layout, Place(rank, layout.ranks))


def all_reduce(what: str, axis, elements: int, dtype) -> Sent:
    """Of so many elements on each rank."""
    return _sent("all_reduce", what, axis, shares(elements, axis.size), dtype)


def all_gather(what: str, axis, sizes: list[int], dtype) -> Sent:
    """Of shards of so many elements."""
    return _sent("all_gather", what, axis, sizes, dtype)


def reduce_scatter(what: str, axis, sizes: list[int], dtype) -> Sent:
    """Into shards of so many elements."""
    return _sent("reduce_scatter", what, axis, sizes, dtype)


def _sent(operation: str, what: str, axis, sizes: list[int], dtype) -> Sent:
    task = Task(sizes, np.dtype(dtype), axis.nodes())
    return Sent(f"{what}: {operation}", axis.name, promised(operation, None, axis.index, task).elements)


# --------------------------------------------------------------------------------------- what stands around the layers: enter, leave

def around_layer(here: Here, what: str) -> list[Sent]:
    """Of a layer on the residual stream: in one piece, or in the steps of a ring that send as many bytes as rings do."""
    if not here.mesh.layout.tp_ring or moved(here, what):
        return enter(here, what) + leave(here, what)
    tp, sizes = here.mesh.axis("tp"), _shards(here)
    gathers, scatters = (Sent(f"{what} {name}: {name}", tp.name, formula(tp.index, sizes).elements * np.dtype(here.dtype).itemsize)
                         for name, formula in (("gather_matmul", volume.all_gather), ("matmul_scatter", volume.reduce_scatter)))
    return [gathers, scatters, *backward(scatters, gathers)]


def backward(*sent: Sent) -> list[Sent]:
    """The same, on the way up."""
    return [one._replace(forward=False) for one in sent]


def moved(here: Here, kind: str) -> bool:
    """Does the layer stand in another order over cp than the stream?"""
    return kind in STATE and reorders(kind, here.mesh.layout.cp_mamba, way_of(here.model, here.mesh.layout))


def enter(here: Here, what: str) -> list[Sent]:
    """Tokens into a layer, and their gradient out of it."""
    tp = here.mesh.axis("tp")
    if not here.mesh.layout.sp:
        return backward(all_reduce(f"{what} enter, backward", tp, here.tokens * here.model.width, here.dtype))
    sizes = _shards(here)
    return [all_gather(f"{what} enter", tp, sizes, here.dtype),
            *backward(reduce_scatter(f"{what} enter, backward", tp, sizes, here.dtype))]


def leave(here: Here, what: str) -> list[Sent]:
    """A layer's addends out of it, and their gradient into it."""
    tp = here.mesh.axis("tp")
    if not here.mesh.layout.sp:
        return [all_reduce(f"{what} leave", tp, here.tokens * here.model.width, here.dtype)]
    sizes = _shards(here)
    return [reduce_scatter(f"{what} leave", tp, sizes, here.dtype),
            *backward(all_gather(f"{what} leave, backward", tp, sizes, here.dtype))]


def _shards(here: Here) -> list[int]:
    """Elements of the stream on each rank of tp, under sequence parallelism."""
    return [columns * here.rows * here.model.width for columns in shares(here.spot.columns, here.mesh.layout.tp)]


# ---------------------------------------------------------------------------------------------------------------- the kinds of layer

def embedding(here: Here) -> list[Sent]:
    """Each rank looks up its words; the vectors are added up."""
    return leave(here, "embedding")


def attention(here: Here) -> list[Sent]:
    """Heads need nothing of one another; tokens need the keys of others (`volume_cp.py`)."""
    if here.model.cut:
        return []
    layout, cp = here.mesh.layout, here.mesh.axis("cp")
    cut = Cut(cp.size, layout.cp_attention, here.rows, here.length, here.spot.held("H/tp"), here.spot.held("K/tp"),
              here.model.head_width, np.dtype(here.dtype).itemsize, cp.node, places=cp.ranks, earlier=here.earlier)
    return around_layer(here, "attention") + (both_ways(CONTEXT, cp, context_volume(cp.index, cut)) if cp.size > 1 else [])


CONTEXT = "attention over cp"


def both_ways(what: str, axis, ways) -> list[Sent]:
    """Forward and backward volumes."""
    there, back = (Sent(what, axis.name, way.elements) for way in ways)
    return [there, *backward(back)]


def mlp(here: Here) -> list[Sent]:
    """Nor do features."""
    return around_layer(here, "mlp")


def mamba1(here: Here) -> list[Sent]:
    """dt, B and C are made of the channels of all ranks: a sum on the way, forward and backward."""
    elements = here.rows * here.spot.inside("mamba1") * (here.model.dt_rank + 2 * here.model.state)
    inner = all_reduce("mamba1 dt, B, C", here.mesh.axis("tp"), elements, here.dtype)
    return around_layer(here, "mamba1") + [inner, *backward(inner)] + state(here, "mamba1")


def mamba2(here: Here) -> list[Sent]:
    """Ranks that share a group of the norm add up its sum of squares, and the gradient of its scale: one number a token for each
    group among those that are linked by shared ones (`parallel.tensor.norm_groups`)."""
    tp, width = here.mesh.axis("tp"), here.model.norm_width
    cuts = [here.model.part("MP", tp.size, rank) for rank in range(tp.size)]
    ranks = linked(cuts, tp.index, width)
    groups = len(groups_of([cuts[rank] for rank in ranks], width))
    inner = all_reduce("mamba2 norm", tp.among(ranks), here.rows * here.spot.inside("mamba2") * groups, here.dtype)
    return around_layer(here, "mamba2") + [inner, *backward(inner)] + state(here, "mamba2")


def state(here: Here, kind: str) -> list[Sent]:
    """What conv and scan hand on over cp, or exchange for heads, and the way to another order and back (`volume_state.py`)."""
    layout, cp, tp = here.mesh.layout, here.mesh.axis("cp"), here.mesh.axis("tp")
    cut = StateCut(here.model, kind, layout.cp_mamba, way_of(here.model, layout), cp.size, here.rows, here.length,
                   np.dtype(here.dtype).itemsize, cp.node, (tp.size, tp.index), cp.ranks)
    return both_ways(f"{kind} over cp", cp, state_volume(cp.index, cut))


def norm(here: Here) -> list[Sent]:
    """Each token is normed where it is."""
    return []


def head(here: Here) -> list[Sent]:
    """Logits stay where their words are."""
    return enter(here, "head")


def loss(here: Here) -> list[Sent]:
    """The largest logit of each token, then two sums (`parallel/vocabulary.py`).  Backward sends nothing."""
    tp = here.mesh.axis("tp")
    return [all_reduce("loss, largest logit", tp, here.tokens, here.dtype), all_reduce("loss, sums", tp, 2 * here.tokens, here.dtype)]


LAYERS: dict[str, Callable[[Here], list[Sent]]] = {
    "embedding": embedding, "attention": attention, "mlp": mlp, "mamba1": mamba1, "mamba2": mamba2, "norm": norm, "head": head,
    "loss": loss}


# ------------------------------------------------------------------------------------------------------------------- the whole step

def step(model: Model, mesh: Mesh, chain, params: dict, batches: list[tuple[int, ...]], dtype, micro_batches: int = 0) -> list[Sent]:
    """Everything that a rank sends in one training step.  batches: its micro-batches, [rows, length] of their whole rows; or all
    slices of each, [rows, length, *lengths of the slices before]; micro_batches: how many; chain: its part of the model's; params: of the
    parameters, or arrays of their shapes."""
    here = [Here(model, mesh, rows, length, dtype, tuple(earlier)) for rows, length, *earlier in batches]
    sent = []
    for each in passes(model, mesh.layout, micro_batches or len(batches), mesh.coordinates()["pp"]):
        sent += [one for kind in each.kinds for one in layer(here[each.piece], kind)] + between(here[each.piece], each)
    return around(mesh) + sent + gradients(mesh, chain, params)


def layer(here: Here, kind: str) -> list[Sent]:
    """One layer's, with what recomputation sends again."""
    sent, what = LAYERS[kind](here), again(here.model, here.mesh.layout, kind)
    return sent + [one for one in sent if one.forward and (what == "layer" or (what == "core" and one.what == CONTEXT))]


def between(here: Here, each: Pass) -> list[Sent]:
    """From stage to stage: y [B, S, D] of the tokens that the stream has here, and its gradient."""
    size = here.rows * here.spot.outside * here.model.width * np.dtype(here.dtype).itemsize
    ways = {"stage, forward": each.hands_on, "stage, backward": each.hands_back}
    return [Sent(what, "pp", size) for what, sends in ways.items() if sends]


def around(mesh: Mesh) -> list[Sent]:
    """Two numbers of the step, over all ranks that have other tokens, and the squares of the gradient's norm, over those that have
    other parts of the model."""
    return [all_reduce("targets", mesh.axis("dp", "cp"), 1, np.int64), all_reduce("loss", mesh.axis("dp", "pp", "cp"), 1, np.float64),
            all_reduce("squared norm", mesh.axis("pp", "tp"), 1, np.float64)]


def gradients(mesh: Mesh, chain, params: dict) -> list[Sent]:
    """One all_reduce a bucket."""
    sent = []
    for bucket in buckets(params, chain, mesh.layout):
        dtype = params[bucket.names[0][0]][bucket.names[0][1]].dtype
        sent.append(all_reduce(f"gradients of {len(bucket.names)} parameters", bucket.over.on(mesh), bucket.bytes // dtype.itemsize,
                               dtype))
    return sent


def by_axis(sent: list[Sent]) -> dict[str, int]:
    """Axis -> bytes, of the axes on which anything is sent."""
    total: dict[str, int] = {}
    for one in sent:
        total[one.axis] = total.get(one.axis, 0) + one.bytes
    return {axis: size for axis, size in total.items() if size}
