"""Observers: who wants to know what a rank does.

Every op, message and named value of a run is told to the observers of the rank that runs it, and to nobody else.
An observer changes nothing.  The ledger below counts; a clock, a trace or an oracle's recorder are observers too.

The observers live in a context variable, so each rank, thread or process, has its own.  What nobody watches costs
one look-up.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np

_observers: ContextVar[tuple] = ContextVar("observers", default=())


class Errand(NamedTuple):
    """What a rank is about: what its messages belong to."""
    axis: str | None = None         # the mesh axis, e.g. "dp"
    operation: str | None = None    # the outermost collective, e.g. "all_reduce"
    call: Any = None                # what the axis made of that collective's call (see `refpar/sanitizer/calls.py`)


_errand: ContextVar[Errand] = ContextVar("errand", default=Errand())


class Message(NamedTuple):
    """One message as one of its two ends sees it."""
    way: str                # "send" or "recv"
    peer: int               # the other rank, counted in the world
    bytes: int
    axis: str | None        # the mesh axis it travels on, e.g. "dp"
    operation: str | None   # the outermost collective that it belongs to, e.g. "all_reduce"
    array: Any              # what travels; who wants to keep it copies it


class Observer:
    """Base of all observers: override what you want to hear."""

    def op(self, name: str, flops: int): ...
    def message(self, message: Message): ...
    def value(self, name: str, array): ...
    def held(self, kind: str, tree): ...
    def began(self, axis: str, operation: str): ...
    def ended(self, axis: str, operation: str): ...


@contextmanager
def watching(observer: Observer):
    """Let `observer` hear what this rank does inside the block; blocks nest."""
    token = _observers.set(_observers.get() + (observer,))
    try:
        yield observer
    finally:
        _observers.reset(token)


def op(name: str, flops: int):
    """A matrix product or another counted op: name and floating-point operations (2mnk for a product)."""
    for observer in _observers.get():
        observer.op(name, flops)


def message(way: str, peer: int, array, on: Errand):
    """An array left (`send`) or arrived (`recv`), on the errand on which it was posted."""
    observers = _observers.get()
    if observers:
        told = Message(way, peer, array.nbytes, on.axis, on.operation, array)
        for observer in observers:
            observer.message(told)


def value(name: str, array):
    """A named array, or a nest of them, passed by: the points that an oracle compares."""
    for observer in _observers.get():
        observer.value(name, array)


def held(kind: str, tree):
    """What the store `kind` (weight, gradient, optimizer, saved, received) holds now: a nest of dicts, lists and arrays."""
    for observer in _observers.get():
        observer.held(kind, tree)


def current() -> Errand:
    """What this rank is about."""
    return _errand.get()


class errand:
    """with errand(axis, operation): name the axis and operation of the messages inside the block.  The outermost name of each
    wins: the messages of an all_reduce stay an all_reduce's, though it is made of a reduce_scatter and an all_gather."""
    __slots__ = ("axis", "operation", "call", "token", "outermost")

    def __init__(self, axis: str | None = None, operation: str | None = None, call=None):
        self.axis, self.operation, self.call = axis, operation, call

    def __enter__(self):
        was = _errand.get()
        self.outermost = _observers.get() if self.operation and not was.operation else ()
        self.token = _errand.set(Errand(was.axis or self.axis, was.operation or self.operation, was.call or self.call))
        for observer in self.outermost:
            observer.began(self.axis, self.operation)

    def __exit__(self, *failure):
        _errand.reset(self.token)
        for observer in self.outermost:
            observer.ended(self.axis, self.operation)


def calling(axis, operation: str, x=None, options: dict | None = None) -> errand:
    """The errand of a collective call on `axis`, which is told of it unless the call is a part of another collective."""
    call = _errand.get().call or axis.began(operation, x, options or {})
    return errand(axis.name, operation, call)


def collective(function):
    """Decorate `function(x, axis, ...)`: its messages are booked under its name and its axis's name, and its calls told to the
    axis, with all arguments by name."""
    _, _, *others = signature(function).parameters.values()
    names = [other.name for other in others]
    defaults = {other.name: other.default for other in others if other.default is not Parameter.empty}

    @wraps(function)
    def booked(x, axis, *args, **options):
        with calling(axis, function.__name__, x, defaults | dict(zip(names, args)) | options):
            return function(x, axis, *args, **options)
    return booked


def arrays_of(tree):
    """Every array in a nest of dicts, lists, tuples (named ones too) and arrays; anything else is passed over."""
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from arrays_of(branch)
    elif isinstance(tree, (list, tuple)):
        for branch in tree:
            yield from arrays_of(branch)


def _base(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def elements(tree) -> int:
    """Elements held by a nest of arrays, each base array once: two views of one buffer are one buffer, of elements as large as a
    view's (the base of a float array may be complex)."""
    return sum({id(base): base.nbytes // array.itemsize for array in arrays_of(tree) for base in [_base(array)]}.values())


class Ledger(Observer):
    """The books of one rank: messages and bytes by (way, axis, operation), FLOPs by op, peak elements by kind of store."""

    def __init__(self):
        self.messages = Counter()
        self.bytes = Counter()
        self.flops = Counter()
        self.peak = defaultdict(int)

    def op(self, name, flops):
        self.flops[name] += flops

    def message(self, told):
        self.messages[told.way, told.axis, told.operation] += 1
        self.bytes[told.way, told.axis, told.operation] += told.bytes

    def held(self, kind, tree):
        self.peak[kind] = max(self.peak[kind], elements(tree))

    def sent(self, axis=None, operation=None) -> tuple[int, int]:
        """(messages, bytes) sent on `axis` for `operation`; None means any."""
        keys = [key for key in self.messages if key[0] == "send" and axis in (None, key[1]) and operation in (None, key[2])]
        return sum(self.messages[key] for key in keys), sum(self.bytes[key] for key in keys)
