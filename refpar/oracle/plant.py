"""Planting a fault: a function compiled with one place of its text replaced, put in the place of the right one for a while.

A fault is data.  Product code has no hook for it: the function object stays, only its `__code__` is swapped, so every module,
every closure and every thread that holds the function runs the faulty one, until the block ends, however it ends.

The code of inner functions belongs to the function around them: the fault names that one, and closures that it makes inside
the block are faulty (those made before are not).  A rank that is a process has functions of its own, so `PlantedWorld` plants
in each.
"""
from __future__ import annotations

import ast
import importlib
import inspect
import linecache
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple


@dataclass(frozen=True)
class Fault:
    """One real fault, and how to have it here.  `old` must stand exactly once in the function's text, as the file has it."""
    name: str               # what `verify --fault NAME` calls it
    report: str             # the public report it comes from, "owner/repository#number"
    summary: str            # the symptom and the cause, in a sentence
    function: str           # "refpar.parallel.data:reduce_gradients": module and dotted name
    old: str
    new: str
    shows: Any = None       # a situation in which the fault is seen
    hides: Any = None       # a situation in which it is not: what a test must avoid
    property: str = ""      # the property that sees it, by its name in `oracle/properties.py`


@contextmanager
def planted(fault: Fault):
    """Inside the block the fault's function runs with `new` in place of `old`.  Blocks nest, on one function too; a fault that is
    planted already stays as it is.

    ValueError where the function is not found, or its text does not hold `old` exactly once.
    """
    function, caches = _find(fault)
    if _mark(fault) in function.__code__.co_filename:
        yield function
        return
    faulty = _compile(function, fault)
    was = function.__code__, function.__defaults__, function.__kwdefaults__
    try:
        _swap(function, caches, faulty.__code__, faulty.__defaults__, faulty.__kwdefaults__)
        yield function
    finally:
        _swap(function, caches, *was)


def _swap(function, caches, code, defaults, kwdefaults):
    function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, kwdefaults
    for cache in caches:                                                    # what the other code computed is not this one's
        cache.cache_clear()


def _mark(fault: Fault) -> str:
    """Stands in the file name of faulty code, which tracebacks show."""
    return f", with {fault.name}>"


def _find(fault: Fault) -> tuple[Callable, list]:
    """The plain function under its decorators, and those of the decorators that keep results (lru_cache)."""
    module, _, name = fault.function.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"fault {fault.name}: there is no function {fault.function} ({error})") from None
    found = found.fget if isinstance(found, property) else found
    caches = []
    while hasattr(found, "__wrapped__"):
        caches += [found] if hasattr(found, "cache_clear") else []
        found = found.__wrapped__
    if not inspect.isfunction(found):
        raise ValueError(f"fault {fault.name}: {fault.function} is a {type(found).__name__}, and only functions can be planted in")
    return found, caches


def _compile(function, fault: Fault):
    """The function that the replaced text defines: same globals, free variables of the same names, its own defaults if changed.

    It stands on the same lines of a copy of its file that only `linecache` knows, so that tracebacks show the faulty text, and
    a second fault planted in the same function finds the first one there.
    """
    lines, first = inspect.getsourcelines(function)
    right = "".join(lines)
    if right.count(fault.old) != 1:
        raise ValueError(f"fault {fault.name}: its old text stands {right.count(fault.old)} times in {fault.function}, and must "
                         f"stand there exactly once: {fault.old!r}")
    wrong = right.replace(fault.old, fault.new)
    file = linecache.getlines(function.__code__.co_filename)
    path = f"<{function.__code__.co_filename}{_mark(fault)}"
    copy = "".join(file[:first - 1]) + wrong + "".join(file[first - 1 + len(lines):])
    linecache.cache[path] = len(copy), None, copy.splitlines(keepends=True), path

    definition, before = _parse(wrong, first, fault), _parse(right, first, fault)
    made = _define(definition, function, path)
    if ast.dump(definition.args) == ast.dump(before.args):
        made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def _parse(text: str, first: int, fault: Fault) -> ast.FunctionDef:
    """The text's def, without decorators, its lines counted from `first`."""
    try:
        definition = ast.parse(textwrap.dedent(text)).body[0]
    except SyntaxError as error:
        raise ValueError(f"fault {fault.name}: with its new text {fault.function} is not Python ({error})") from None
    if not isinstance(definition, ast.FunctionDef):
        raise ValueError(f"fault {fault.name}: {fault.function} must be written with def")
    definition.decorator_list = []
    return ast.increment_lineno(definition, first - 1)


def _define(definition: ast.FunctionDef, function, path: str):
    """Run the def inside a function whose arguments are the free variables, and inside a class where it is a method, so that
    the compiler sees them as it saw the original's (`super()` and private names too)."""
    free = function.__code__.co_freevars
    given = {name: cell.cell_contents for name, cell in zip(free, function.__closure__ or ()) if name != "__class__"}
    if free:                                                # a free variable stays one, though the fault drops it
        definition.body += ast.parse(f"lambda: ({', '.join(free)})").body
    owner = function.__qualname__.split(".")[-2:-1]
    if owner and owner != ["<locals>"]:
        text = f"def around({', '.join(given)}):\n class {owner[0]}: pass\n return {owner[0]}.__dict__[{definition.name!r}]"
        frame = ast.parse(text)
        frame.body[0].body[0].body = [definition]
    else:
        frame = ast.parse(f"def around({', '.join(given)}):\n return {definition.name}")
        frame.body[0].body.insert(0, definition)
    scope: dict = {}
    flags = function.__code__.co_flags & annotations.compiler_flag          # was the file read with this one's first import?
    exec(compile(ast.fix_missing_locations(frame), path, "exec", flags, dont_inherit=True), function.__globals__, scope)
    made = scope["around"](**given)
    made.__code__ = made.__code__.replace(co_qualname=function.__code__.co_qualname)
    return made


class _Program(NamedTuple):
    """A program that plants the fault before it runs: what a rank that is a process is sent."""
    program: Callable
    fault: Fault

    def __call__(self, wire, *args):
        with planted(self.fault):
            return self.program(wire, *args)


class PlantedWorld:
    """`world`, but every program that it runs has the fault.  Outside `run`, this process has the right function."""

    def __init__(self, world, fault: Fault):
        self.world, self.fault = world, fault

    def __getattr__(self, name):
        return getattr(self.world, name)

    def run(self, program: Callable, size: int, *args) -> list:
        """As `world.run`.  Threads share their functions, so there the fault is planted once, around them all."""
        if self.world.kind == "threads":
            with planted(self.fault):
                return self.world.run(program, size, *args)
        return self.world.run(_Program(program, self.fault), size, *args)
