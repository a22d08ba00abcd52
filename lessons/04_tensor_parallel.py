"""Lesson 04: tensor parallel.

What:  Every rank holds a part of every matrix.  A layer's first maps are cut by columns and its last by rows, and then one all_reduce
       completes a layer; attention is cut by heads.  A tiny GPT is trained so, and equals a single process.
Why:   It is how one layer is made faster, and how a model fits that is too large for one rank.  And it is where one all_reduce too
       few, too many or in the wrong direction hides best: the layer that one text prints is wrong, and is run here.

Run:   python lessons/04_tensor_parallel.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/04_tensor_parallel.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages of the wrong and of the right layer
       ... --mine FILE         judge your own by_rows(x, w, axis): x [T, D] and w [D, O] are whole, and y is: use your rows of w only
       ... --fault NAME        plant a real mistake, such as bias-on-every-rank, and see which check finds it: the lesson ends red
"""
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from refpar import lesson
from refpar.comm.collectives import all_gather, all_reduce
from refpar.comm.mesh import Mesh
from refpar.config import PRESETS, Layout, Model, share, shares
from refpar.contrast import summa
from refpar.corpus import Batch
from refpar.nn.init import initial
from refpar.oracle import faults_tp, properties
from refpar.oracle.properties_comm import require
from refpar.oracle.situation import PROOF, Situation
from refpar.parallel import fill
from refpar.parallel.placement import cut
from refpar.plan import promise

X = np.arange(1.0, 5.0)[None]                               # one token of width 4
W = np.arange(24.0).reshape(4, 6) - 10                      # a linear map to 6
GPT = Model(blocks=1, width=6, heads=4, kv_heads=2, head_width=2, ffn=8, norm="layer", mlp="gelu_tanh", mlp_bias=True,
            attention_bias="all", vocab=256)


def by_columns(x, w, axis):
    """Each rank has some columns, and so some of y: together they are all of it."""
    mine = x @ w[:, share(w.shape[1], axis.size, axis.index)]
    return all_gather(mine, axis, 1, shares(w.shape[1], axis.size))


def by_rows(x, w, axis):
    """Each rank has some rows, and so an addend of all of y."""
    mine = share(w.shape[0], axis.size, axis.index)
    return all_reduce(x[:, mine] @ w[mine], axis)


def wrong(x, w, axis):
    """As printed: cut by columns, and all_reduced.  To fit, the parts must be as long as each other; they are added all the same."""
    columns = w.shape[1] // axis.size * axis.size
    return all_reduce(x @ w[:, share(columns, axis.size, axis.index)], axis)


def three_layers(wire):
    """y of each form on this rank."""
    axis = Mesh(Layout(tp=wire.size), wire).axis("tp")
    return {form.__name__: form(X, W, axis) for form in (by_columns, by_rows, wrong)}


def one_mlp(wire):
    """Forward and backward of one MLP of the model: what this rank holds, and what it gives."""
    mesh = Mesh(Layout(tp=wire.size), wire)
    chain = fill.model(GPT, mesh)
    params = initial(GPT, chain, 0, np.float64, cut=lambda name, dims: cut(GPT, dims, mesh), rough=True)
    name, layer = chain.layers[2]
    x = np.linspace(-1, 1, 12).reshape(1, 2, 6)
    none = np.zeros((1, 2), np.int64)
    y, _, saved = layer.forward(x, params[name], Batch(none, none, none, none, none), None)
    dx, _, _ = layer.backward(np.ones_like(y), None, saved, params[name], Batch(none, none, none, none, none))
    return {"shapes": {p: list(w.shape) for p, w in params[name].items()}, "y": y, "dx": dx}


class Map(NamedTuple):
    """A linear map on some ranks, of whole numbers."""
    layout: Layout
    width: int              # of x, which rows of W meet

    def drawn(self) -> tuple[np.ndarray, np.ndarray]:
        """x [2, D] and W [D, 3]."""
        return np.arange(2.0 * self.width).reshape(2, -1) - 3, np.arange(3.0 * self.width).reshape(-1, 3) - 5


def one_map(wire, situation: Map):
    """y as this rank has it."""
    return by_rows(*situation.drawn(), Mesh(situation.layout, wire).axis("tp"))


def rows_give_the_map(world, situation: Map):
    """A property: every rank has all of y, exactly; of wide maps, and of those with fewer rows than there are ranks."""
    x, w = situation.drawn()
    for rank, y in enumerate(world.run(one_map, situation.layout.ranks, situation)):
        require(np.array_equal(y, x @ w), f"of x {list(x.shape)} and W {list(w.shape)} on {situation.layout.ranks} ranks, y on rank "
                f"{rank} begins {y[0]}, and must begin {(x @ w)[0]}")


def teach(page: lesson.Page):
    p = page.ranks
    page.say(f"1. One linear map, y = x W, with x {list(X.shape)} and W {list(W.shape)} on {lesson.count(p, 'rank')}, in three ways.")
    told = page.run(three_layers)
    right = X @ W
    for form in (by_columns, by_rows):
        page.check(all(np.array_equal(one[form.__name__], right) for one, _ in told), f"{form.__name__}: y is that of the whole W, "
                   + {"by_columns": "by an all_gather of parts", "by_rows": "by an all_reduce of addends"}[form.__name__])
    found = told[0][0]["wrong"]
    page.say(f"  as one text prints it, by columns and then all_reduced, y has shape {list(found.shape)} and begins {found[0, :2]};",
             f"  it should have {list(right.shape)} and begin {right[0, :2]}.  Parts of y are no addends of it.")
    page.check(p == 1 or found.shape != right.shape or not np.array_equal(found, right), "on more than one rank it is wrong")
    page.show(told, lambda array: f"{array.size} numbers")

    page.say("", "2. An MLP: its first map by columns, its last by rows.  Between them nothing is sent; after them one all_reduce.")
    told = page.run(one_mlp)
    for rank, (one, _) in enumerate(told):
        page.say(f"  rank {rank}   " + "   ".join(f"{name} {shape}" for name, shape in one["shapes"].items() if "norm" not in name))
    page.check(all(one["y"].tobytes() == told[0][0]["y"].tobytes() for one, _ in told), "y has the same bits on all ranks")
    page.check(all(one["dx"].tobytes() == told[0][0]["dx"].tobytes() for one, _ in told),
               "so has the gradient of x: it was all_reduced too")
    one = [promise.all_reduce_sends(rank, 12, p, np.float64) for rank in range(p)]
    page.compare(told, [(2 * messages, 2 * size) for messages, size, *_ in one])

    page.say("", f"3. Attention is cut by heads.  Here {GPT.heads} query heads stand on {GPT.kv_heads} key heads:")
    for rank in range(p):
        heads, keys = GPT.part("HE", p, rank), GPT.part("KE", p, rank)
        page.say(f"  rank {rank}   query heads {heads.start // 2} to {heads.stop // 2}   key heads {keys.start // 2} to {keys.stop // 2}")
    page.say("  With more ranks than key heads, a run of ranks shares one: each holds its weights, and their gradients are summed.")

    page.say("", "4. A step of training, beside a single process: loss, every gradient, the norm, weights and moments after two steps.")
    small = replace(PROOF, rows=3, sequence=9)
    for model, sp, what in ((GPT, False, "a GPT, its layers completed by all_reduce"),
                            (GPT, True, "the same with its stream cut by tokens"),
                            (replace(PRESETS["llama-uneven"], blocks=1, kv_heads=1, qk_norm=True), False, "one key head for all ranks")):
        page.prove(properties.sharded_equals_single, Situation(model, Layout(tp=p, sp=sp), small, 0, (5, 16), (0.0, 0.4)), what)

    page.say("", "5. In two dimensions (SUMMA) W and x are cut both ways.  Numbers that a rank sends for y = x W, x [4096, 512],",
             "  W [512, 512]:",
             f"  {'ranks':>7}{'by rows':>12}{'in a grid':>12}")
    for q in (2, 4, 8, 16):
        row, grid = summa.sent_by_one_dimension(4096, 512, q * q) // q**2, summa.sent_forward(4096, 512, 512, q) // q**2
        page.say(f"  {q * q:>7}{row:>12,}{grid:>12,}")
    page.say("  By rows it is 2 T O whatever the ranks are; in a grid it falls with their root, and weights travel too.")
    if page.fault:
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.")
    page.judge("6.", [rows_give_the_map], [Map(Layout(tp=ranks), width) for ranks in (1, 2, 3, 4) for width in (8, 5, 1)])


if __name__ == "__main__":
    lesson.main(teach, mine=by_rows, gives=lambda x, w, axis: np.zeros((len(x), w.shape[1])), faults=faults_tp.LAYERS)
