"""The tracer: runs the shape comments of the code.

A line that ends in `# [B, S, F/tp]` says what shape the array has that the line makes.  While `Tracer` is on, each such line of the
files it was given is checked against the array, every time the line has run.

    [B, S, F/tp]    a letter is a size; /tp cuts it into this rank's shard, HE is a product that is cut in whole H
    [..., 2*D]      any dims in front; also W-1, E/2, 7
    [n, T, I]       a capital that has no given size takes the one that it meets first, and keeps it until the function returns;
                    a small letter or a word keeps it within its line, so it may change from one round of a loop to the next
    [B, S, D] +tp   a sum not yet reduced: its shape is the same
    [2, D] or [D]   one of these
    [M], ... [N]    one of these, or of some between: dims in which the two differ may have any size

What is checked: of an assignment, the first array among its targets; of `return` and `yield`, the first array of the value; of a
bare call, its `out=`, else its first array.  Arrays inside tuples, dicts and named tuples count.
"""
from __future__ import annotations

import ast
import io
import math
import re
import sys
import threading
import tokenize
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from refpar.config import AXES, share

BRACKETS = re.compile(r"#\s*\[([^\[\]]*)\]")
ANOTHER = re.compile(r"(\s+or|,\s*\.\.\.)\s+\[([^\[\]]*)\]")
PARTIAL = re.compile(rf"\s*\+(?:{'|'.join(AXES)}|ep)\b")


class Comment(NamedTuple):
    """One shape comment: the shapes it allows, as parsed dims, and the statement (first to last line) that makes the array."""
    path: str
    line: int
    text: str
    shapes: list[list]
    first: int
    last: int
    statement: ast.stmt

    @property
    def place(self) -> str:
        return f"{Path(self.path).name}:{self.line}"


# ------------------------------------------------------------------------------------------------------------- reading comments

def parse_dims(text: str) -> list:
    """"B, S, F/tp" -> one of each dim: Ellipsis, a word (str), or the tree of an expression.  ValueError where it is none."""
    return [_parse_dim(PARTIAL.sub("", part).strip()) for part in text.split(",") if part.strip()]


def _parse_dim(text: str):
    if text == "...":
        return Ellipsis
    if re.fullmatch(r"[a-z]\w+|\w+ [\w ]+", text):
        return text
    try:
        tree = ast.parse(text.replace("'", "_"), mode="eval").body          # B' is a letter of its own, B_ to Python
    except SyntaxError:
        raise ValueError(f"dim {text!r} cannot be read") from None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Name, ast.Load, ast.Constant)):
            raise ValueError(f"dim {text!r} is more than letters, numbers and + - * /")
    return tree


def _brackets(comment: str) -> list[str]:
    """"# [B, S] or [S]: why" -> "B, S" and "S"; none if the comment does not begin with a bracket.

    "# [B, M], ... [B, N]" -> also "B, between 1".
    """
    if not re.match(r"#\s*\[", comment):
        return []
    found = BRACKETS.match(comment)
    if not found:
        raise ValueError("its bracket is not closed, or holds another")
    inside = [found.group(1)]
    while found := ANOTHER.match(comment, found.end()):
        ends = [part.split(",") for part in (inside[-1], found.group(2))]
        inside.append(found.group(2))
        if "..." in found.group(1):
            inside.append(", ".join(a if a == b else f"between {i}" for i, (a, b) in enumerate(zip(*ends))))
    return inside


def comments_of(path: str) -> list[Comment]:
    """The shape comments of a file that stand behind code in functions.  ValueError, with the place, for one that says nothing."""
    source = Path(path).read_text()
    statements = _statements(ast.parse(source))
    found: dict[int, Comment] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type != tokenize.COMMENT or token.line.strip().startswith("#"):
            continue
        holders = [span for span in statements if span[0] <= line <= span[1]]
        try:
            inside = _brackets(token.string)
            if not inside or not holders:
                continue
            first, last, statement = max(holders, key=lambda span: span[0])
            if first in found:
                raise ValueError("the statement has two shape comments")
            text = " or ".join(f"[{dims}]" for dims in inside)
            found[first] = Comment(path, line, text, [parse_dims(dims) for dims in inside], first, last, statement)
        except ValueError as error:
            raise ValueError(f"{path}:{line}: shape comment {token.string!r}: {error}") from None
    return list(found.values())


def _statements(tree) -> list[tuple[int, int, ast.stmt]]:
    """(first line, last line, statement) of all that stand in functions; of a loop or a `with`, its header."""
    spans = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.FunctionDef)):
                    spans.append((node.lineno, max(node.lineno, node.body[0].lineno - 1), node))
                elif isinstance(node, ast.stmt):
                    spans.append((node.lineno, node.end_lineno, node))
    return spans


# ------------------------------------------------------------------------------------------------------------- sizes of a dim

class Sizes:
    """What letters mean: `sizes` letter -> whole size, `axes` axis -> (ranks, my index); the rest is bound as it is met."""

    def __init__(self, sizes: dict[str, int], axes: dict[str, tuple[int, int]] | None = None):
        self.given, self.axes = dict(sizes), axes or {}

    def mismatch(self, dims: list, shape: tuple[int, ...], met: dict[str, int]) -> str | None:
        """Why an array of this shape is not what the dims say, or None.  `met`: capitals of this call, added to here."""
        if Ellipsis in dims:
            at = dims.index(Ellipsis)
            behind = len(dims) - at - 1
            if len(shape) < at + behind:
                return f"it has {len(shape)} dims"
            pairs = [*zip(dims[:at], shape), *zip(dims[at + 1:], shape[len(shape) - behind:])]
        elif len(dims) != len(shape):
            return f"it has {len(shape)} dims"
        else:
            pairs = list(zip(dims, shape))
        here: dict[str, int] = {}
        for dim, size in sorted(pairs, key=lambda pair: not isinstance(pair[0], ast.Name)):     # letters teach expressions
            reason = self._one(dim, size, met, here)
            if reason:
                return reason
        return None

    def _one(self, dim, size: int, met: dict, here: dict) -> str | None:
        text = dim if isinstance(dim, str) else ast.unparse(dim).replace(" ", "")
        known = self.given | met | here
        unknown = [letter for letter in _symbols(dim) if letter not in known]
        if len(unknown) > 1 or (unknown and any(f"/{axis}" in text for axis, (ranks, _) in self.axes.items() if ranks > 1)):
            unknown, dim = [text], text                                     # cannot be solved: the whole is one unknown
            if text in known:
                unknown = []
        if not unknown:
            expected = known[text] if isinstance(dim, str) else self._value(dim, known)
            return None if expected == size else f"{text} is {expected:g} and it has {size}"
        letter = unknown[0]
        zero, one = (0, 1) if isinstance(dim, str) else (self._value(dim, known | {letter: x}) for x in (0, 1))
        solution = (size - zero) / (one - zero) if one != zero else math.nan
        if solution != int(solution if math.isfinite(solution) else 0) or solution < 0:
            return f"{text} cannot be {size}"
        (met if letter.isupper() else here)[letter] = int(solution)
        return None

    def _value(self, node, known: dict) -> float:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return math.prod(known[letter] for letter in _letters(node.id))
        if isinstance(node.right, ast.Name) and node.right.id in AXES:
            return self._shard(node, known)
        left, right = self._value(node.left, known), self._value(node.right, known)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        return left / right if isinstance(node.op, ast.Div) else left // right

    def _shard(self, node, known: dict) -> float:
        size = int(self._value(node.left, known))
        ranks, index = self.axes.get(node.right.id, (1, 0))
        first = known[_letters(node.left.id)[0]] if isinstance(node.left, ast.Name) else size
        part = share(size, ranks, index, size // first if first else 1)
        return part.stop - part.start


def _letters(name: str) -> list[str]:
    """"HE" -> H, E; other names, B_ too, are one symbol."""
    return list(name) if name.isupper() and "_" not in name else [name]


def _symbols(dim) -> list[str]:
    if isinstance(dim, str):
        return [dim]
    names = [node.id for node in ast.walk(dim) if isinstance(node, ast.Name) and node.id not in AXES]
    return list(dict.fromkeys(letter for name in names for letter in _letters(name)))


# ------------------------------------------------------------------------------------------------------------- while code runs

class Tracer:
    """Checks the shape comments of `paths` while it is on; `wrong` has a sentence for each that failed, `seen` those that ran."""

    def __init__(self, paths, sizes: Sizes):
        self.sizes = sizes
        self.comments = {str(path): {c.first: c for c in comments_of(str(path))} for path in paths}
        self.seen: set[tuple[str, int]] = set()
        self.wrong: dict[tuple[str, int], str] = {}
        self.last: dict = {}                                                # frame -> the comment whose statement is running
        self.met: dict = defaultdict(dict)                                  # frame -> the capitals of this call

    @contextmanager
    def on(self):
        """Trace this thread, and those that start inside."""
        before = sys.gettrace()
        sys.settrace(self._call)
        threading.settrace(self._call)
        try:
            yield self
        finally:
            sys.settrace(before)
            threading.settrace(before)

    def unseen(self) -> list[str]:
        """The comments that no run has checked, as file:line [dims]."""
        return [f"{c.place} {c.text}" for comments in self.comments.values() for c in comments.values()
                if (c.path, c.line) not in self.seen]

    def _call(self, frame, event, arg):
        comments = self.comments.get(frame.f_code.co_filename)
        if not comments or frame.f_code.co_name.startswith("<"):            # a comprehension stands on its statement's lines
            return None

        def local(frame, event, arg):
            running = self.last.get(frame)
            if event == "exception":
                self.last.pop(frame, None)
            elif event == "return":
                if running:
                    self._check(running, frame, arg)
                self.last.pop(frame, None)
                self.met.pop(frame, None)
            elif event == "line":
                if running and running.first <= frame.f_lineno <= running.last:
                    return local
                if running:
                    self._check(running, frame, None)
                self.last.pop(frame, None)
                if frame.f_lineno in comments:
                    self.last[frame] = comments[frame.f_lineno]
            return local
        return local

    def _check(self, comment: Comment, frame, returned):
        made = _first_array(_made(comment.statement, frame, returned))
        key = (comment.path, comment.line)
        self.seen.add(key)
        if made is None:
            self.wrong.setdefault(key, f"{comment.place}: {comment.text}, and the line makes no array")
            return
        tries = [(dict(self.met[frame]), dims) for dims in comment.shapes]
        reasons = [self.sizes.mismatch(dims, np.shape(made), met) for met, dims in tries]
        if None in reasons:
            self.met[frame] = tries[reasons.index(None)][0]
        else:
            reason = ", or ".join(reasons)
            self.wrong.setdefault(key, f"{comment.place}: {comment.text}, and the array is {list(np.shape(made))}: {reason}")


def _made(statement, frame, returned):
    """The values that a statement has made, in order of preference."""
    if isinstance(statement, ast.Return):
        return [returned]
    if isinstance(statement, ast.Assign):
        targets = [e for target in statement.targets for e in (target.elts if isinstance(target, ast.Tuple) else [target])]
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For)):
        targets = statement.target.elts if isinstance(statement.target, ast.Tuple) else [statement.target]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Yield):
        return [returned]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        targets = [k.value for k in call.keywords if k.arg == "out"] + call.args
    else:
        return []
    return [_evaluated(target, frame) for target in targets]


def _evaluated(target, frame):
    """A target's value now: a name, or y[:, t]."""
    target = target.value if isinstance(target, ast.Starred) else target
    try:
        return eval(ast.unparse(target), frame.f_globals, frame.f_locals)
    except (NameError, TypeError, IndexError):
        return None


def _first_array(value):
    """The first array in a nest of lists, tuples and dicts."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in map(_first_array, inside) if found is not None), None)
