"""The reader's own function in the place of ours: `--mine FILE` of a lesson.

It stands wherever refpar has its own, and is judged by the same properties; what it returns must be of the form of ours.
"""
from __future__ import annotations

import importlib.util
import linecache
import sys
import traceback
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np

from refpar import watch


class Wrong(Exception):
    """What stands in the reader's file cannot go on; the text is the sentence, `details` the lines that explain it."""

    def __init__(self, sentence: str, details: str = ""):
        super().__init__(sentence)
        self.details = details


def misfit(found, form) -> str | None:
    """What `found` is and must be instead, where it is not of the form: a nest of dicts, tuples, arrays, numbers and words.
    A tuple (one, ...) stands for any number of values like the one."""
    if isinstance(form, dict):
        if not isinstance(found, dict) or found.keys() != form.keys():
            has = f"a dict of {', '.join(map(str, found))}" if isinstance(found, dict) else described(found)
            return f"{has}, and must return a dict of {', '.join(map(str, form))}"
        return next(filter(None, (misfit(found[key], form[key]) for key in form)), None)
    if isinstance(form, tuple) and len(form) == 2 and form[1] is ...:
        if not isinstance(found, tuple | list):
            return f"{described(found)}, and must return values in a row"
        return next(filter(None, (misfit(value, form[0]) for value in found)), None)
    if isinstance(form, str):
        return None if isinstance(found, str) else f"{described(found)}, and must return a word"
    if isinstance(form, tuple):
        if not isinstance(found, tuple | list) or len(found) != len(form):
            return f"{described(found)}, and must return {len(form)} values"
        return next(filter(None, map(misfit, found, form)), None)
    kinds = np.ndarray if np.ndim(form) else (int, float, np.number, np.ndarray)
    fits = isinstance(found, kinds) and np.shape(found) == np.shape(form)
    return None if fits else f"{described(found)}, and must return {described(form)}"


def described(found) -> str:
    """None, a number, 2 values, an array of shape [3, 2]."""
    if isinstance(found, np.ndarray):
        return f"an array of shape {list(found.shape)}"
    if isinstance(found, tuple | list):
        return f"{len(found)} value{'s' * (len(found) != 1)}"
    return "None" if found is None else "a number" if isinstance(found, int | float | np.number) else f"a {type(found).__name__}"


def judged(function: Callable, gives: Callable) -> Callable:
    """`function`, whose result must be of the form gives(its arguments); else Wrong."""
    @wraps(function)
    def mine(*args, **options):
        form, found = gives(*args, **options), function(*args, **options)
        wrong = misfit(found, form)
        if wrong:
            raise Wrong(f"{function.__name__} returned {wrong}")
        return found
    return mine


class Mine(NamedTuple):
    """The reader's function, and ours, in whose place it stands: in every module, and in the lesson's own names."""
    path: Path
    function: Callable
    ours: Callable
    lesson: dict[str, Any]

    @contextmanager
    def in_place(self):
        """Inside the block whoever has our function has the reader's: every module, and every table of one."""
        modules = [vars(module) for name, module in list(sys.modules.items()) if name.split(".")[0] == "refpar"] + [self.lesson]
        tables = [value for names in modules for value in list(names.values()) if isinstance(value, dict)]
        places = [(names, name) for names in modules + tables for name, value in list(names.items()) if value is self.ours]
        for names, name in places:
            names[name] = self.function
        try:
            yield
        except Exception as error:
            raise self.wrong(error) from error
        finally:
            for names, name in places:
                names[name] = self.ours

    def wrong(self, error: Exception) -> Wrong:
        """The error as a sentence, with the innermost line of the reader's file that it went through."""
        lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(self.path.absolute())]
        first, *more = str(error).split("\n")
        rank = next((f" {note}" for note in getattr(error, "__notes__", ()) if "rank" in note), "")
        if isinstance(error, Wrong):
            return Wrong(f"{error}{rank}")
        if not lines:
            kind = f"{type(error).__name__}: " if isinstance(error, TypeError | LookupError | AttributeError) else ""
            return Wrong(f"{kind}{first}", "\n".join(more))
        last = lines[len(lines) - 1]
        text = linecache.getline(last.filename, last.lineno).strip()
        where = f"  {self.path.name}, line {last.lineno}, in {last.name}:  {text}"
        return Wrong(f"{type(error).__name__}: {first}{rank}", "\n".join([*more, where]))


def alike(theirs: Signature, ours: Signature) -> bool:
    """Can theirs be called with what ours must be given, or with some of what it may be given too?"""
    names = list(ours.parameters)
    for least in range(sum(p.default is p.empty for p in ours.parameters.values()), len(names) + 1):
        with suppress(TypeError):
            theirs.bind(*names[:least])
            return True
    return False


def load_mine(path: Path, ours: Callable, gives: Callable, names: dict[str, Any]) -> Mine:
    """The function of our function's name in the reader's file; ValueError, one sentence, where there is none that takes what
    ours must be given."""
    name = ours.__name__
    if not path.is_file():
        raise ValueError(f"--mine: there is no file {path}")
    spec = importlib.util.spec_from_file_location("mine", path.absolute())
    if spec is None:
        raise ValueError(f"--mine: {path} must be a Python file, with a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"--mine: {path}, line {error.lineno}, is not Python: {error.msg}") from None
    except Exception as error:
        line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.absolute())][-1:]
        raise ValueError(f"--mine: {path}, line {line[0] if line else '?'}, raises {type(error).__name__}: {error}") from None
    if not callable(getattr(module, name, None)):
        raise ValueError(f"--mine: {path} must define a function {name}, and does not")
    function = getattr(module, name)
    wanted = signature(ours)
    wanted = wanted.replace(parameters=[p for p in wanted.parameters.values() if not isinstance(p.default, np.ufunc)])  # all add
    if not alike(signature(function), wanted):
        raise ValueError(f"--mine: {name} of {path} takes {signature(function)}, and must take {wanted}")
    function = judged(function, gives)
    return Mine(path, watch.collective(function) if hasattr(ours, "__wrapped__") else function, ours, names)
