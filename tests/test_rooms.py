"""The rooms, read from the source: who imports whom, how large things are, and what no line may contain."""
import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "refpar").rglob("*.py"))}
TREES = {path: ast.parse(text) for path, text in FILES.items()}

# What stands in a room above may import what stands in a room below; within a room anything goes.  nn and comm share a height,
# and so do not know each other.  A name is a room or a module of the same height.
HEIGHTS = [
    ("watch",),
    ("config", "corpus"),
    ("sanitizer",),
    ("ngram",),
    ("nn",), ("comm",),
    ("parallel",),
    ("train", "checkpoint"),
    ("algorithms", "launch", "reading", "named", "saves", "reshard"),      # collectives by name; what a command is given, where it writes
    ("sample", "progress", "trace", "imports"),
    ("clock",),
    ("plan", "schedules", "contrast"),                                      # what things cost: formulas; pipelines by name, and in time
    ("fit",),                                                   # a whole training run
    ("oracle",),
    ("infer",),
    ("show",), ("bench",), ("mine",), ("lesson",), ("conformance",),
    ("cli", "commands", "lesson", "__main__"),
]
HEIGHT = {room: height for height, rooms in enumerate(HEIGHTS) for room in rooms}
STRANGERS = {("nn", "comm"), ("comm", "nn")}
CORE = ("config", "corpus", "nn", "comm", "parallel", "train", "checkpoint")              # what was ordered
INSTRUMENTS = ("watch", "sanitizer")                            # what stands below it and is told what it does
BASE = CORE + INSTRUMENTS
PACKAGES = {"numpy"}                                            # and the standard library
ALSO = {"refpar/comm/mpi.py": {"mpi4py"}}
TESTERS = {"pytest", "hypothesis"}                              # conformance alone


def room(path: str) -> str:
    """"refpar/nn/ops.py" -> "nn"; "refpar/train.py" -> "train"; the package's own file knows nobody: "watch"."""
    part = path.split("/")[1].removesuffix(".py")
    return "watch" if part == "__init__" else part


def imports(tree, path: str, top_only=False):
    """(module, line) of every import, or of those that run when the module is imported."""
    for node in (_outside_functions(tree) if top_only else ast.walk(tree)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively, and every import here names its room"
            if node.module == "refpar":
                yield from ((f"refpar.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield node.module, node.lineno


def _outside_functions(tree):
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from _outside_functions(node)


def functions(tree, inside=None):
    """(function, the node it stands in) of every def."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node, inside
        yield from functions(node, node if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else inside)


def code_lines(path: str) -> int:
    """Lines of code: not blank, not a comment alone, not of a docstring, and not the rows of a table of data."""
    told = set()
    for node in TREES[path].body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and not any(isinstance(part, ast.Lambda) for part in ast.walk(node)):
            told |= set(range(node.lineno + 1, node.end_lineno + 1))                # the rows of a table of data
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            told |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return sum(1 for number, line in enumerate(FILES[path].splitlines(), 1)
               if line.strip() and not line.lstrip().startswith("#") and number not in told)


def lines_of(rooms) -> int:
    return sum(code_lines(path) for path in FILES if rooms is None or room(path) in rooms)


def test_every_room_is_on_the_list():
    unknown = {room(path) for path in FILES} - set(HEIGHT)
    assert not unknown, f"{unknown} stand in no room: give each its height in this test"


def wrong_imports(trees):
    wrong = []
    for path, tree in trees.items():
        here = room(path)
        for module, line in imports(tree, path):
            if module.startswith("refpar."):
                there = module.split(".")[1]
                above = there in HEIGHT and here in HEIGHT and HEIGHT[there] > HEIGHT[here]
                if above or (here, there) in STRANGERS:
                    wrong.append(f"{path}:{line}: {here} imports {there}, which stands above it or is none of its business")
                if there in HEIGHT and here in BASE and there not in BASE:
                    wrong.append(f"{path}:{line}: {here} belongs to the core and imports {there}, which does not")
    return wrong


def test_lower_rooms_never_import_higher_ones():
    assert not wrong_imports(TREES), "\n".join(wrong_imports(TREES))


@pytest.mark.parametrize("path, line", [
    ("refpar/nn/x.py", "from refpar.comm.mesh import Mesh"), ("refpar/comm/x.py", "from refpar.nn import ops"),
    ("refpar/config.py", "import refpar.train"), ("refpar/nn/x.py", "from refpar import parallel"),
    ("refpar/train.py", "def f():\n    from refpar import cli"), ("refpar/checkpoint.py", "from refpar import ngram")])
def test_a_wrong_import_is_found(path, line):
    assert wrong_imports({path: ast.parse(line)})


def test_packages():
    """numpy and the standard library only; mpi4py in comm/mpi.py; anything optional inside the function that needs it."""
    known = sys.stdlib_module_names | PACKAGES | {"refpar"}
    for path, tree in TREES.items():
        allowed = known | ALSO.get(path, set()) | (TESTERS if room(path) == "conformance" else set())
        for module, line in imports(tree, path, top_only=True):
            assert module.split(".")[0] in allowed, f"{path}:{line} imports {module} at start-up, and the base is numpy alone"
        for module, line in imports(tree, path):
            package = module.split(".")[0]
            assert package != "mpi4py" or path in ALSO, f"{path}:{line} imports mpi4py, which only comm/mpi.py may"
            assert package not in TESTERS - allowed, f"{path}:{line} imports {module}, which only tests and conformance may"
            assert room(path) not in BASE or package in allowed, f"{path}:{line}: the core imports {module}, and its base is numpy"


def too_large(path: str, text: str):
    """A sentence for everything in a file that is longer than it may be."""
    lines = text.split("\n")
    if len(lines) > 401:
        yield f"{path} has {len(lines) - 1} lines, and a file has at most 400"
    for function, _ in functions(ast.parse(text)):
        length = function.end_lineno - function.lineno + 1
        if length > 60:
            yield f"{path}:{function.lineno}: {function.name} has {length} lines, and a function has at most 60"
    for number, line in enumerate(lines, 1):
        if len(line) > 140:
            yield f"{path}:{number} has {len(line)} characters, and a line has at most 140"


def test_sizes():
    large = [sentence for path, text in FILES.items() for sentence in too_large(path, text)]
    assert not large, "\n".join(large)
    assert lines_of(CORE) < 4000, f"the core has {lines_of(CORE)} lines of code, and is read in an evening: fewer than 4000"
    assert lines_of(None) < 12000, f"refpar has {lines_of(None)} lines, and has fewer than 12000"


def silent(path: str, tree):
    """Files, classes and functions that others use and that have no docstring: not those inside a function, those whose name begins
    with an underscore, and methods that override one which has it or whose one line says it."""
    if tree.body and not ast.get_docstring(tree):
        yield f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{path}:{node.lineno}: class {node.name} has no docstring"
    for function, inside in functions(tree):
        if function.name.startswith("_") or isinstance(inside, ast.FunctionDef):
            continue
        bare = isinstance(inside, ast.ClassDef) and (inside.bases or inside.name.startswith("_") or _says_nothing(function))
        if not bare and not ast.get_docstring(function):
            yield f"{path}:{function.lineno}: {function.name} has no docstring"


def test_every_public_function_says_what_it_is():
    found = [sentence for path, tree in TREES.items() for sentence in silent(path, tree)]
    assert not found, "\n".join(found)


def _says_nothing(function) -> bool:
    """def op(self): ...     or a body of one line, whose name says it."""
    return len(function.body) == 1


def forbidden(tree):
    """(line, sentence) of what law 7 forbids: a -1 in a reshape, and a slice from -n on, where n may be 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
            for part in [*node.args, *(e for arg in node.args if isinstance(arg, ast.Tuple) for e in arg.elts)]:
                if isinstance(part, ast.UnaryOp) and ast.unparse(part) == "-1":
                    yield node.lineno, f"{ast.unparse(node)}: -1 cannot count an empty array"
        if isinstance(node, ast.Slice) and isinstance(node.lower, ast.UnaryOp) and isinstance(node.lower.op, ast.USub):
            if not isinstance(node.lower.operand, ast.Constant):
                yield node.lower.lineno, f"[{ast.unparse(node)}] takes everything where it should take nothing"


def test_no_minus_one_in_reshape_and_no_slice_from_minus_n():
    wrong = [f"{path}:{line}: {sentence}" for path, tree in TREES.items() for line, sentence in forbidden(tree)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("line, found", [
    ("x.reshape(-1)", 1), ("x.reshape(3, -1)", 1), ("x.reshape((2, -1))", 1), ("np.reshape(x, (-1, 2))", 1), ("x.reshape(3, n)", 0),
    ("x[-n:]", 1), ("x[:, -(w - 1):]", 1), ("x[-1:]", 0), ("x[n:]", 0), ("x[..., :-n]", 0)])
def test_what_law_7_forbids_is_found(line, found):
    assert len(list(forbidden(ast.parse(line)))) == found


def test_lower_rooms_print_nothing():
    for path, tree in TREES.items():
        if room(path) in ("watch", "nn", "comm", "parallel"):
            for node in ast.walk(tree):
                printed = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
                assert not printed, f"{path}:{node.lineno} prints, and the lower rooms only tell `watch`"


def test_no_special_case_for_one_rank():
    """Law 7: axes of size 1 take the same path."""
    for path, text in FILES.items():
        if room(path) in ("comm", "parallel", "train"):
            found = re.search(r"if (?:\w+\.)*size == 1\b", text)
            assert not found, f"{path}: {found.group()}, and one rank is not special"


STEP = """
import dataclasses, importlib, pkgutil, refpar
for module in pkgutil.walk_packages(refpar.__path__, "refpar."):
    if module.name not in ("refpar.comm.mpi", "refpar.__main__"):
        importlib.import_module(module.name)
import numpy as np
from refpar.comm.mesh import Mesh
from refpar.comm.threads import ThreadWorld
from refpar.config import PRESETS, Layout, Training
from refpar.corpus import batch, split
from refpar.nn.build import build
from refpar.nn.init import initial
from refpar.train import State, train_step

def program(wire, model, training):
    mesh = Mesh(Layout(dp=wire.size), wire)
    chain = build(model, seed=0)
    params = initial(model, chain, 0, np.dtype(training.dtype))
    zeros = [{l: {n: np.zeros_like(a) for n, a in group.items()} for l, group in params.items()} for _ in range(2)]
    rows = slice(2 * wire.rank, 2 * wire.rank + 2)
    text = split("counting", [bytes(range(256)) * 4], training.sequence)
    state, report = train_step(chain, State(params, *zeros), [batch(text, training, 0, rows)], mesh, training)
    return report.loss

for name in ("llama-tiny", "gpt2-tiny", "mamba1-tiny", "mamba2-tiny"):
    losses = ThreadWorld().run(program, 2, PRESETS[name], Training(rows=4, sequence=32, dtype="float64"))
    assert losses[0] == losses[1] and 0 < losses[0] < 20, losses
print("the core trains alone")
"""


def test_the_core_trains_where_the_rooms_around_it_are_deleted(tmp_path):
    """Copy the core and its instruments alone, import every module of it, and train one step of each family on two ranks."""
    for path, text in FILES.items():
        if room(path) in BASE:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    done = subprocess.run([sys.executable, "-c", STEP], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1"})
    assert "the core trains alone" in done.stdout, done.stderr[-2000:]
