"""Lesson 02: backward by hand.

What:  A backward pass answers one question for each number of a model: if it grows a little, by how much does the loss?  Here the
       answers are written out, for each layer of a Transformer and of Mamba-2, and judged by finite differences along a
       direction, which need no second implementation.  Every rank is a judge with a direction of its own; nothing is sent.
Why:   Whoever cuts a model over ranks cuts its backward pass too.  What is saved for it, what it costs, which of its halves can
       wait, and what finite differences cannot see: later lessons build on all of that.

Run:   python lessons/02_backward_by_hand.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/02_backward_by_hand.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through backward, one line for each layer: no messages are sent here
       ... --fault NAME        plant a real mistake, such as no-document-mask, and see which check finds it: the lesson ends red
       ... --mine FILE         judge your own rmsnorm_backward(dy, saved, w): dy [..., D], w [D]; saved["x"] is the input and
                               saved["scale"] [..., 1] is 1 / sqrt(mean of its squares + eps).  Return dx and dw.  What you are
                               given is not yours to write.
"""
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from refpar import corpus, lesson, reading, watch
from refpar.config import Layout, Model, Training
from refpar.nn import chain as chains
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients, loss_of, zeros_like
from refpar.nn.init import WRITERS, initial
from refpar.nn.keyed import key, normal
from refpar.nn.loss import cross_entropy_backward, cross_entropy_forward
from refpar.nn.ops import linear_backward, linear_forward, rmsnorm_backward, rmsnorm_forward
from refpar.nn.product import settle
from refpar.oracle import faults
from refpar.oracle.situation import Situation

LLAMA = Model(blocks=1, width=8, heads=2, kv_heads=1, head_width=4, ffn=12)
MAMBA2 = Model(pattern=("mamba2",), blocks=2, width=8, ssm_heads=4, ssm_head_width=4, groups=2, state=3, conv=3, chunk=4)
MODELS = {"llama": LLAMA, "mamba2": MAMBA2}
TRAINING = Training(rows=2, sequence=16, dtype="float64")
CUTS = (7, 11, 5, 9)                        # in each row a second document begins at this token
PATH = Path(__file__).with_name("text.txt")
TEXT = reading.load(PATH, TRAINING.sequence)
WORDS = PATH.read_text().split()
LAYERS = ("llama", "1.attention"), ("llama", "2.mlp"), ("llama", "3.norm"), ("llama", "4.head"), ("mamba2", "1.mamba2")
BRANCHES = "attention", "mlp", "mamba2"     # the layers that write into the residual stream
STEP = 1e-6                                 # h: the error of a difference is of the order of h**2, and rounding's 1e-16/h
ALLOWED = 1e-7                              # of the magnitudes of all that was added up

FAULTS = tuple(map(faults.fault_named, ("no-document-mask", "backward-of-one-group")))


# ------------------------------------------------------------------------------------------------------------- what is worked on

def packed(rows: int = TRAINING.rows) -> corpus.Batch:
    """Rows of the text, each of two documents: positions restart at the cut, and the last token before it predicts nothing."""
    batch = corpus.batch(TEXT, replace(TRAINING, rows=rows), 0)
    cut, column = np.resize(CUTS, rows)[:, None], np.arange(TRAINING.sequence)      # [B, 1], [S]
    second = column >= cut                                                          # [B, S]
    return batch._replace(targets=np.where(column == cut - 1, -1, batch.targets), position=column - cut * second,
                          document=2 * np.arange(rows)[:, None] + second)


def built(family: str):
    """A model, and weights moved off their 1 and 0, behind which a mistake could hide."""
    chain = build(MODELS[family])
    return chain, initial(MODELS[family], chain, TRAINING.seed, np.float64, rough=True)


def drawn(name: str, *shape: int) -> np.ndarray:
    """Standard normal numbers, a function of the name alone: the same on every rank and machine."""
    return normal(key(TRAINING.seed, "lesson 02", name), np.arange(math.prod(shape))).reshape(shape)


# ------------------------------------------------------------------------------------------------------------------- the judge

def inner(a: dict, b: dict) -> float:
    """<a, b>: the products of all numbers of the same place, added up."""
    return sum(float(np.vdot(a[name], b[name])) for name in a)


def moved(x: dict, v: dict, h: float) -> dict:
    """x + h v."""
    return {name: x[name] + h * v[name] for name in x}


def difference(f, x: dict, v: dict, h: float = STEP) -> float:
    """(f(x + h v) - f(x - h v)) / 2h: how fast f grows along v, found without any backward pass."""
    return (f(moved(x, v, h)) - f(moved(x, v, -h))) / (2 * h)


def judge(name: str, f, x: dict, g: dict, who) -> tuple[str, float, float, bool]:
    """Is g the gradient of f at x?  Along one direction, drawn for this judge: what g says, what the difference says, and whether
    they agree.  A direction has a part of every number, so no wrong one escapes but by chance."""
    v = {part: drawn(f"direction {who} {name} {part}", *array.shape) for part, array in x.items()}
    said, measured = inner(g, v), difference(f, x, v)
    size = sum(float(np.abs(g[part] * v[part]).sum()) for part in x)
    return name, said, measured, abs(said - measured) <= ALLOWED * size


# ------------------------------------------------------------------------------------------------ 1, 2: a linear map, RMS norm

def linear_map(wire):
    """y = x W on whole numbers: two tokens, each the lengths of three words.  Gradients, and what moving one number by 1 does."""
    x = np.array([len(word) for word in WORDS[:6]]).reshape(2, 3)
    W, dy = np.array([[1, 0], [2, -1], [0, 3]]), np.array([[1, 2], [-1, 0]])
    y, saved = linear_forward(x, W)
    dx, product = linear_backward(dy, saved, W)
    dW = settle(product)
    told = [int((dy * linear_forward(x + one, W)[0]).sum() - (dy * y).sum()) for one in np.eye(6, dtype=int).reshape(6, 2, 3)]
    told += [int((dy * linear_forward(x, W + one)[0]).sum() - (dy * y).sum()) for one in np.eye(6, dtype=int).reshape(6, 3, 2)]
    return {"x": x, "W": W, "y": y, "dy": dy, "dx": dx, "dW": dW}, told, product.x is x and product.dy is dy


def norms(wire):
    """RMS norm by hand, judged; whether what was given to backward is as it was; and for three sizes of h the difference, what is
    between it and <g, v>, and the same for a gradient without the mean."""
    x, w, dy = drawn("norm x", 3, LLAMA.width), drawn("norm w", LLAMA.width), drawn("norm dy", 3, LLAMA.width)
    saved = rmsnorm_forward(x, w, LLAMA.norm_eps)[1]
    given = dy.copy(), {name: array.copy() for name, array in saved.items()}, w.copy()
    dx, dw = rmsnorm_backward(*given)
    kept = all(map(np.array_equal, (given[0], *given[1].values(), given[2]), (dy, *saved.values(), w)))
    at, g, forgetful = {"x": x, "w": w}, {"x": dx, "w": dw}, {"x": dy * w * saved["scale"], "w": dw}

    def f(a):
        return float(np.vdot(dy, rmsnorm_forward(a["x"], a["w"], LLAMA.norm_eps)[0]))
    v = {name: drawn(f"norm v {wire.rank} {name}", *array.shape) for name, array in at.items()}
    slopes = [(h, difference(f, at, v, h)) for h in (1e-1, 1e-2, 1e-3)]
    table = [(h, slope, abs(slope - inner(g, v)), abs(slope - inner(forgetful, v))) for h, slope in slopes]
    return judge("norm", f, at, g, wire.rank), kept, table


# ------------------------------------------------------------------------------------------------------- 3: softmax, and the layers

def softmax(scores):
    """exp(s) over its sum; the largest is taken off first, which changes nothing but the range."""
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def softmax_backward(dp, p):
    """dS = P (dP - rowsum(P dP)): what raises all scores of a row alike raises nothing."""
    return p * (dp - (p * dp).sum(axis=-1, keepdims=True))


def softmax_and_loss(wire):
    """A row of three, with probabilities 1/2, 1/4, 1/4: the gradient through softmax, and that of the loss of target 0."""
    logits = np.log([2.0, 1.0, 1.0])
    _, saved = cross_entropy_forward(logits[None], np.array([0]))
    p = softmax(logits)
    return p, softmax_backward(np.array([1.0, 0.0, 0.0]), p), cross_entropy_backward(1.0, saved)[0]


def layer_judged(family: str, name: str, who):
    """A layer with its norm, as it stands on the residual stream, judged: its input and all its weights.  And does a branch that
    writes nothing into the stream let the stream's gradient pass, to the bit?"""
    chain, params = built(family)
    batch, layer = packed(), dict(chain.layers)[name]
    x = {"input": drawn(f"{name} input", *batch.tokens.shape, MODELS[family].width)}

    def forward(at):
        y, after, saved = layer.forward(at["input"], at, batch, layer.start(at, batch))
        return y, saved, zeros_like(after)                                          # a future that nobody reads: zeros

    def backward(dy, at):
        _, saved, nothing = forward(at)
        dx, _, products = layer.backward(dy, nothing, saved, at, batch)
        return settle(products) | {"input": dx}
    at, silent = params[name] | x, {array: w * (array not in WRITERS) for array, w in params[name].items()} | x
    dy = drawn(f"{name} dy", *forward(at)[0].shape)
    passes = np.array_equal(backward(dy, silent)["input"], dy)
    return *judge(name, lambda moved: float(np.vdot(dy, forward(moved)[0])), at, backward(dy, at), who), passes


def judged(wire):
    """Every layer, along this rank's own directions."""
    return [layer_judged(family, name, wire.rank) for family, name in LAYERS]


# ------------------------------------------------------------------------------------------------------- 4 to 7: the whole chain

class Gradients(watch.Observer):
    """Keeps what each layer hands down in backward."""

    def __init__(self):
        self.down = []

    def value(self, name, array):
        if name.startswith("d ") and array is not None:
            self.down.append((name.removeprefix("d "), array))


def down_and_up(chain, params, batch):
    """One batch: FLOPs of forward and of the halves B and W of backward; what forward saved; what backward handed down."""
    with watch.watching(watch.Ledger()) as forward:
        logits, after, saved = chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))
    _, kept = cross_entropy_forward(logits, batch.targets)
    dlogits = cross_entropy_backward(1 / batch.count, kept)
    with watch.watching(watch.Ledger()) as B, watch.watching(Gradients()) as handed:
        _, _, products = chains.backward(chain, dlogits, saved, params, batch, zeros_like(after))
    with watch.watching(watch.Ledger()) as W:
        chains.gradients(chain, products)
    return [ledger.flops for ledger in (forward, B, W)], saved, handed.down


def whole(wire, family: str):
    """A model from tokens to loss, along one direction through all its weights; and its gradients, for the others to compare."""
    chain, params = built(family)
    batch, names = packed(), [(layer, name) for layer in params for name in params[layer]]
    _, grads = loss_and_gradients(chain, params, batch, batch.count)

    def loss(flat):
        nest = {layer: {name: flat[layer, name] for name in params[layer]} for layer in params}
        return float(loss_of(chain, nest, batch)[0]) / batch.count
    flat, g = ({pair: tree[pair[0]][pair[1]] for pair in names} for tree in (params, grads))
    return judge(family, loss, flat, g, wire.rank), {".".join(pair): grad.tobytes() for pair, grad in g.items()}


def costs(wire, family: str):
    """FLOPs of forward, B and W; what was saved of one batch and of one twice as large; whether a weight is among it."""
    chain, params = built(family)
    (flops, saved, handed), (_, more, _) = (down_and_up(chain, params, packed(rows)) for rows in (2, 4))
    linear = [ledger[name] for ledger, name in zip(flops, ("linear", "input gradient", "weight gradient"))]
    rest = [sum(ledger.values()) - one for ledger, one in zip(flops, linear)]
    weights = {id(array) for array in watch.arrays_of(params)}
    among = sum(id(array) in weights or id(array.base) in weights for array in watch.arrays_of(saved))
    layers = {name: watch.elements(one) for name, one in saved.items()}
    sizes = [(name, list(array.shape), float(np.sqrt(np.mean(array**2)))) for name, array in handed]
    return {"linear": linear, "rest": rest, "saved": watch.elements(saved), "more": watch.elements(more), "among": among,
            "handed": sizes, "layers": layers, "weights": watch.elements(params)}


def isolation(wire, family: str):
    """Other tokens in each row's first document: how many of its logits move, how many of the second's, and of how many?"""
    chain, params = built(family)
    batch = packed()
    first = batch.document % 2 == 0                                                 # [B, S]
    other = batch._replace(tokens=np.where(first, (batch.tokens + 1) % 256, batch.tokens))
    logits = [chains.forward(chain, one.tokens, params, one, chains.start(chain, params, one))[0] for one in (batch, other)]
    moved = np.abs(logits[0] - logits[1]).max(axis=2) > 0                           # [B, S]
    return int(moved[first].sum()), int(moved[~first].sum()), int((~first).sum())


# ----------------------------------------------------------------------------------------------------------------------- the page

def teach(page: lesson.Page):
    first_numbers(page)
    by_layers(page)
    the_chain(page)
    the_price(page)
    documents(page)
    if page.fault:
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.")
    page.judge("8.", [rmsnorm_backward_is_the_derivative], [Situation(LLAMA, Layout(dp=p)) for p in range(1, 5)])


def first_numbers(page: lesson.Page):
    told = page.run(linear_map)
    held, by_one, lent = told[0].result
    page.say("1. A linear map, y = x W, on whole numbers.  dy says by how much the loss grows with each number of y; then",
             "   dx = dy W'  and  dW = x' dy  say it of x and of W: each factor's gradient is dy times the other factor.",
             *grid(x=held["x"], W=held["W"], y=held["y"]), "", *grid(dy=held["dy"], dx=held["dx"], dW=held["dW"]))
    page.check(by_one == [*held["dx"].flat, *held["dW"].flat],
               f"moving each of the {len(by_one)} numbers of x and W by 1 moves <dy, y> by exactly its gradient")
    page.check(lent, "of dW backward keeps only its factors, x and dy: `settle` multiplies, when there is time")

    page.say("", "2. RMS norm, y = x / rms(x) * w.  A direction v for x and w; by hand <g, v>, the judge (f(x+hv) - f(x-hv)) / 2h.",
             "   Every number of x is in the mean that divides all others: a term that people forget.  Rank 0's judgement:",
             f"  {'h':<8}{'difference':<14}{'off <g, v> by':<17}and without that term")
    told = page.run(norms)
    for h, slope, right, forgetful in told[0].result[2]:
        page.say(f"  {h:<8g}{slope:<#14.6g}{right:<17.1e}{forgetful:.4f}")
    page.check(all(one[2][i][2] > 50 * one[2][i + 1][2] for one, _ in told for i in (0, 1)),
               "on every rank a tenth of h leaves about a hundredth of the error: it is the difference's, not the gradient's")
    page.check(all(one[0][3] for one, _ in told), f"{lesson.count(page.ranks, 'judge')}: dx and dw of RMS norm")
    page.check(all(one[1] for one, _ in told), "what rmsnorm_backward was given is as it was")


def by_layers(page: lesson.Page):
    told = page.run(softmax_and_loss)
    p, ds, dlogits = told[0].result
    page.say("", "3. Softmax and the loss, on a row of three; then every layer with its norm.",
             f"  P                      {row(p)}", f"  dP                     {row([1, 0, 0])}",
             f"  dS = P (dP - <P, dP>)  {row(ds)}",
             f"  the loss of target 0:  {row(dlogits)}   = P - one-hot")
    page.check(abs(ds.sum()) + abs(dlogits.sum()) < 1e-15, "each gradient adds up to 0: raising all scores alike changes nothing")
    told = [one for one, _ in page.run(judged)]
    page.say(f"  {'layer':<16}{'<g, v> by hand':>16}{'difference':>16}   judges who agree")
    for number, (name, said, measured, *_) in enumerate(told[0]):
        page.say(f"  {name:<16}{said:>#16.6g}{measured:>#16.6g}   {sum(one[number][3] for one in told)} of {page.ranks}")
    wrong = sorted({name for one in told for name, _, _, agree, _ in one if not agree})
    page.check(not wrong, f"all layers, all judges{': not ' + ', '.join(wrong) if wrong else ''}")
    page.check(all(passes for name, *_, passes in told[0] if name.split(".")[1] in BRANCHES),
               "the residual stream adds: a branch that writes nothing lets the gradient pass, to the bit")


def the_chain(page: lesson.Page):
    page.say("", "4. A whole model, from tokens to loss, along one direction through all its weights.")
    for family in MODELS:
        told = page.run(whole, family)
        (_, said, measured, _), _ = told[0].result
        page.say(f"  {family:<10}<g, v> {said:#.6g}   difference {measured:#.6g}")
        page.check(all(verdict[3] for (verdict, _), _ in told), f"{family}: {lesson.count(page.ranks, 'judge')} of all gradients")
        page.check(all(grads == told[0].result[1] for (_, grads), _ in told), f"{family}: all ranks have the same bits")


def the_price(page: lesson.Page):
    told = {family: page.run(costs, family)[0].result for family in MODELS}
    page.say("", "5. What it costs, in floating-point operations: forward, B (gradients of inputs) and W (gradients of weights).",
             f"  {'':<10}{'linear maps':<12}{'F':>8}{'B':>8}{'W':>8}   {'tokens on tokens':<17}{'F':>8}{'B':>8}{'W':>8}")
    for family, one in told.items():
        page.say(f"  {family:<22}" + "".join(f"{x:>8}" for x in one["linear"]) + " " * 20 + "".join(f"{x:>8}" for x in one["rest"]))
    tokens = TRAINING.rows * TRAINING.sequence
    for family, one in told.items():
        formula = 2 * tokens * numbers_of(MODELS[family])
        page.check(one["linear"] == [formula] * 3, f"{family}: 2 for each token and number of a matrix, three times: {formula}")
    page.check(2 * told["llama"]["rest"][1] == 5 * told["llama"]["rest"][0] and not any(one["rest"][2] for one in told.values()),
               "attention: 2 products forward, 5 in B (one of them again, in place of saving it); nothing of this waits for W")

    page.say("", "6. What is saved for backward: activations, one set for each token.  Numbers held, by layer:")
    for family, one in told.items():
        page.say(f"  {family:<10}" + "   ".join(f"{name} {size}" for name, size in one["layers"].items()))
        for name, shape, size in one["handed"] if page.showing else ():
            page.say(f"  up   {name:<14}hands down {shape}, root mean square {size:.2e}")
        page.say(f"  {'':<10}together {one['saved']}, for twice the tokens {one['more']}; weights {one['weights']}")
        page.check(one["more"] == 2 * one["saved"] and one["among"] == 0,
                   f"{family}: twice the tokens, twice the numbers; and no weight is among them")
    page.check(told["llama"]["layers"]["1.attention"] == saved_by_attention(LLAMA, tokens),
               f"attention: its formula, T (2D + 2HE + 2KE + H + 1) and three whole numbers a token: "
               f"{saved_by_attention(LLAMA, tokens)}")


def documents(page: lesson.Page):
    page.say("", "7. What no judge of derivatives can see: a model that computes the wrong thing, and its gradient rightly.",
             "   Other tokens in each row's first document.  Logits that move:")
    for family in MODELS:
        moved_first, moved_second, second = page.run(isolation, family)[0].result
        page.say(f"  {family:<10}first documents {moved_first:>3}   second documents {moved_second:>3} of {second}")
        page.check(moved_first > 0 and moved_second == 0, f"{family}: the second document keeps its bits")


def rmsnorm_backward_is_the_derivative(world, situation):
    """A property, for --mine: along each rank's direction, and what was given is not written."""
    for (_, said, measured, agree), kept, _ in world.run(norms, situation.layout.ranks):
        if not agree:
            raise AssertionError(f"rmsnorm_backward: <g, v> is {said:.9g}, and differences say {measured:.9g}")
        if not kept:
            raise AssertionError("rmsnorm_backward has written into what it was given")


def numbers_of(model: Model) -> int:
    """The numbers of all matrices that tokens are multiplied by: not the embedding, which is looked up, nor the conv's taps."""
    dims = build(model).dims()
    return sum(int(np.prod(model.shape(text))) for layer, group in dims.items() for name, text in group.items()
               if len(text.split()) > 1 and name != "table" and not name.startswith("conv"))


def saved_by_attention(model: Model, tokens: int) -> int:
    """Input of the layer, and scale of its norm; what it reads; q, k, v, out and lse of the core; three numbers of a place."""
    queries, keys = model.heads * model.head_width, model.kv_heads * model.head_width
    return tokens * (2 * model.width + 1 + 2 * queries + 2 * keys + model.heads + 3)


def grid(**matrices) -> list[str]:
    """Matrices of whole numbers side by side, each with its name."""
    lines = []
    for i in range(max(map(len, matrices.values()))):
        cells = (f"{name if i == 0 else '':>6} " + ("".join(f"{n:>4}" for n in x[i]) if i < len(x) else " " * 4 * x.shape[1])
                 for name, x in matrices.items())
        lines.append(" " + "".join(cells).rstrip())
    return lines


def row(x) -> str:
    """Some numbers, short."""
    return "".join(f"{n:>8g}" for n in x)


if __name__ == "__main__":
    lesson.main(teach, mine=rmsnorm_backward, gives=lambda dy, saved, w: (dy, w), faults=FAULTS)
