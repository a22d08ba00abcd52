"""The shape comments of nn and parallel are true: both families train one step under the tracer, and every comment is reached."""
import dataclasses
import importlib.util
from itertools import chain as chained
from pathlib import Path

import numpy as np
import pytest
import scans
from tracer import Sizes, Tracer, comments_of

from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import Layout, Model, Training
from refpar.nn import rope
from refpar.nn.build import build, plain
from refpar.nn.gradient import loss_of
from refpar.nn.init import initial
from refpar.nn.seams import Pair
from refpar.oracle import naive as judges
from refpar.oracle import scans as scan_forms
from refpar.oracle.packed import packed
from refpar.parallel.fill import model as parallel_model
from refpar.parallel.order import part_of, way_of
from refpar.parallel.placement import cut
from refpar.train import State, train_step

ROOT = Path(__file__).parents[1] / "refpar"
PATHS = sorted([ROOT / "oracle" / "naive.py", *(ROOT / "nn").glob("*.py"), *(ROOT / "parallel").glob("*.py")])

# No two sizes that meet are equal, and S is no multiple of the chunk.
ROWS, TOKENS = 5, 13
SIZES = dict(blocks=1, vocab=37, width=20, heads=6, kv_heads=3, head_width=8, ffn=22, ssm_heads=12, ssm_head_width=7, groups=2,
             state=9, conv=4, chunk=6, longest=41, inner=46, dt_rank=11)
MODELS = {
    "llama": Model(**SIZES),
    "llama, tied, with dropout": Model(tied=True, dropout=0.1, **SIZES),
    "mamba2": Model(pattern=("mamba2",), **SIZES),
    "mamba2, norm first, skip by channel": Model(pattern=("mamba2",), norm_first=True, skip_by="channel", **SIZES),
    "mamba1": Model(pattern=("mamba1",), **SIZES),
    "gpt2": Model(norm="layer", positions="learned", attention_bias="all", mlp="gelu", mlp_bias=True, qk_norm=True, softcap=9.0,
                  smoothing=0.1, **SIZES),
    "llama, in halves": Model(rope_pairs="halves", rope_scaling="llama3", mlp_bias=True, attention_bias="qkv", window=5, **SIZES),
}


def step_of(wire, model: Model, fill=None, layout=None):
    """One rank trains one step, and reads another batch forward only."""
    mesh = Mesh(layout or Layout(dp=wire.size), wire)
    training = Training(rows=ROWS * mesh.layout.dp, sequence=TOKENS, dtype="float64")
    chain = build(model, fill=fill) if fill else parallel_model(model, mesh)
    params = initial(model, chain, 0, np.float64, cut=lambda name, dims: cut(model, dims, mesh))
    m, v = ({layer: {name: np.zeros_like(w) for name, w in group.items()} for layer, group in params.items()} for _ in range(2))
    rows = slice(ROWS * mesh.axis("dp").index, ROWS * (mesh.axis("dp").index + 1))
    batch = packed([0], training.rows, TOKENS, model.vocab, (7, 30, 4), (0.0, 0.5), 0).cut(rows)
    batch = part_of(batch, way_of(model, mesh.layout), mesh.axis("cp"))
    train_step(chain, State(params, m, v), [batch], mesh, training)
    loss_of(chain, params, batch)


def naive(model: Model):
    """The judge of each fast form in its place."""
    def fill(name, kind):
        return plain(model)(name, kind)._replace(core=judges.naive_core())
    return fill


def naive_scan(model: Model):
    sizes = scans.Sizes(B=ROWS, S=TOKENS, M=model.ssm_heads, P=model.ssm_head_width, G=model.groups, N=model.state)
    rng = np.random.default_rng(0)
    inputs, position = scans.scan_inputs(rng, sizes), scans.positions(rng, ROWS, TOKENS, 0.2)
    y, after, saved = judges.scan_forward(**inputs, position=position)
    judges.scan_backward(y, after, saved, inputs["A_log"], position)
    model = MODELS["mamba1"]
    steps = rng.standard_normal((2, ROWS, TOKENS, model.inner))
    inputs = [*steps, *rng.standard_normal((2, ROWS, TOKENS, model.state)), rng.standard_normal((model.inner, model.state))]
    past = rng.standard_normal((ROWS, model.state, model.inner))
    for form in (Pair(judges.selective_forward, judges.selective_backward),
                 *map(scan_forms.selective, scan_forms.FORMS.values())):
        y, after, saved = form.forward(*inputs, position, past)
        form.backward(y, after, saved, inputs[4], position)
    judges.naive_rope(rng.standard_normal((ROWS, TOKENS, model.heads, model.head_width)), position,
                      rope.powers(model.head_width, model.rope_base))


@pytest.fixture(scope="module")
def traced() -> Tracer:
    tracer = Tracer(PATHS, Sizes(MODELS["llama"].sizes | {"B": ROWS, "S": TOKENS}))
    with tracer.on():
        for model in MODELS.values():
            ThreadWorld().run(step_of, 2, model)
        ThreadWorld().run(step_of, 1, MODELS["llama"], naive(MODELS["llama"]))
        naive_scan(MODELS["mamba2"])
    return tracer


def test_shape_comments_are_true(traced):
    assert not traced.wrong, "\n".join(traced.wrong.values())


def test_shape_comments_are_true_of_shards():
    """tp=2, of sizes that it divides: the ranks' shards have one shape, and another than the whole.  In a function that is given a
    shard without knowing it, a letter is the size that is here; so only the comments that say /tp are judged."""
    even = {"llama": dict(kv_heads=2), "gpt2": dict(kv_heads=2, vocab=38), "mamba1": {}, "mamba2": {}}
    for name, sizes in even.items():
        model = dataclasses.replace(MODELS[name], **{"vocab": 38} | sizes)
        tracer = Tracer(PATHS, Sizes(model.sizes | {"B": ROWS, "S": TOKENS}, {"tp": (2, 0)}))
        with tracer.on():
            ThreadWorld().run(step_of, 2, model, None, Layout(tp=2))
        wrong = [sentence for sentence in tracer.wrong.values() if "/tp" in sentence]
        assert not wrong, "\n".join(wrong)
        comments = chained.from_iterable(group.values() for group in tracer.comments.values())
        assert sum("/tp" in c.text and (c.path, c.line) in tracer.seen for c in comments) > 5


OVER_CP = (Layout(cp=2), Layout(cp=2, cp_attention="gather"), Layout(cp=2, cp_attention="ulysses", cp_mamba="heads"),
           Layout(cp=2, cp_attention="zigzag", cp_mamba="scan"), Layout(tp=2, sp=True, tp_ring=True))


def test_shape_comments_are_reached(traced):
    """By the runs above, or where only ranks that share a sequence come, by these: there S is what a rank has of it."""
    over_cp = Tracer(PATHS, Sizes({}))
    with over_cp.on():
        for layout in OVER_CP:
            for name in ("llama", "mamba1", "mamba2"):
                ThreadWorld().run(step_of, 2, MODELS[name], None, layout)
    assert len(traced.seen) > 50
    traced.seen |= over_cp.seen
    assert not traced.unseen(), "no run has checked\n" + "\n".join(traced.unseen())


# ------------------------------------------------------------------------------------------------------------- the tracer itself

EXAMPLES = '''
import numpy as np

def right(x):
    y = x.T                                 # [D, S]
    z, w = None, np.zeros((2, 12))          # [2, D/tp*E] only the first array counts
    for t in range(3):
        part = np.zeros((t, 4))             # [s, D]
        part += 1                           # [t, D]: small letters hold for their line
    many = np.stack(
        [x, x, x])                          # [n, S, D]
    q = np.zeros((5, 4, 6))                 # [..., D, H]
    q[0] = 1                                # [D, H] +tp
    r = np.zeros((3, 24, 2))                # [S-1+1, DH, HE/H*2/E]
    c = np.zeros((7, 14))                   # [C, 2*C]
    a = np.zeros(7)                         # [D] or [C]: the second
    b = np.zeros((7, 9))                    # [C, B']
    k = np.zeros((8, 4))                    # [T early, D]
    np.exp(k, out=k)                        # [T early, D]
    return {"y": y}, z                      # [D, S]

def letters(x):
    y = np.zeros((3, 4))                    # [C, D]
    return np.zeros(5)                      # [C]

def dims(x):
    return x                                # [S, D, E]

def size(x):
    y = [
        x + 1]                              # [S, E]
    return y

def nothing(x):
    y = None                                # [S]

def shard(x):
    h = np.zeros((4, 6))                    # [D, H/tp*E]
    return h                                # [D, HE/tp]

def raises(x):
    try:
        y = x @ x                           # [S, S]
    except ValueError:
        y = x
    return y
'''


@pytest.fixture
def examples(tmp_path):
    path = tmp_path / "examples.py"
    path.write_text(EXAMPLES)
    spec = importlib.util.spec_from_file_location("examples", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trace(module, function: str, **axes) -> list[str]:
    tracer = Tracer([module.__file__], Sizes({"S": 3, "D": 4, "H": 6, "E": 2}, axes))
    with tracer.on():
        getattr(module, function)(np.ones((3, 4)))
    return [sentence.split(": ", 1)[1] for sentence in tracer.wrong.values()]


@pytest.mark.parametrize("function, sentences", [
    ("right", ["[2, D/tp*E] only the first"]), ("raises", []),
    ("letters", ["[C], and the array is [5]: C is 3 and it has 5"]),
    ("dims", ["[S, D, E], and the array is [3, 4]: it has 2 dims"]),
    ("size", ["[S, E], and the array is [3, 4]: E is 2 and it has 4"]),
    ("nothing", ["[S], and the line makes no array"])])
def test_the_tracer_says_what_is_wrong(examples, function, sentences):
    found = trace(examples, function)
    if function == "right":
        sentences = ["[2, D/tp*E], and the array is [2, 12]: D/tp*E is 8 and it has 12"]
    assert found == sentences


@pytest.mark.parametrize("index, wrong", [(0, 0), (1, 0), (2, 0)])
def test_the_tracer_knows_shards(examples, index, wrong):
    """H = 6 heads of width 2 over 2 ranks: 6 of 12; with 4 ranks, 2 or 4 of 12."""
    assert trace(examples, "shard", tp=(2, index % 2)) == []
    assert len(trace(examples, "shard", tp=(4, index))) == 2


@pytest.mark.parametrize("comment, sentence", [
    ("# [B, S", "its bracket is not closed"), ("# [B, S)]", "dim 'S)' cannot be read"), ("# [B, f(x)]", "more than letters"),
    ("# [a[0]]", "holds another")])
def test_comments_that_cannot_be_read_are_refused(tmp_path, comment, sentence):
    path = tmp_path / "example.py"
    path.write_text(f"def f(x):\n    return x    {comment}\n")
    with pytest.raises(ValueError, match=r"example.py:2: shape comment .*" + sentence.replace(")", r"\)").replace("(", r"\(")):
        comments_of(str(path))
