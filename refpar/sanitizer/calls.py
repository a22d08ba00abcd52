"""Collective calls: what one rank called, and whether the ranks of a group called the same.

The ranks of a group must make the same calls on it in the same order.  The n-th call of each is compared with the n-th of the
others: operation, axis, dtype, every option (dim, sizes, root, algorithm), and the shape, but for a dim that is cut into shards:
there `sizes` counts.  `exchange` gives each rank a block of its own shape; what i has for j must be what j expects from i.

Threads compare at once (`Roll`), before any message.  Processes remember their last calls and compare them when nothing moves
any more, and at the end of a run (`disagreement`).
"""
from __future__ import annotations

import zlib
from collections import Counter, deque
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from refpar.sanitizer.report import Site, ranks_text
from refpar.config import shares
from refpar.watch import Errand

CUT = {"dim": "sizes", "split": "split_sizes", "join": "join_sizes"}    # the option that names a dim, and the lengths of its shards
REMEMBERED = 8                                                          # calls of each rank


class Mismatch(ValueError):
    """Ranks that meet have called different things; the text says who called what, and where."""


class Call(NamedTuple):
    """One call as one rank made it."""
    ranks: tuple[int, ...]      # of the group
    index: int                  # this rank's place there
    number: int                 # 0, 1, ...: how many calls it had made there before
    terms: dict[str, Any]       # what must be the same on all ranks
    shape: list                 # of its x; of exchange, the shape of the block for each rank,
    takes: list | None          # and of the one expected from each
    site: Site                  # where the program called

    def __str__(self):
        terms = dict(self.terms)
        name = f"{terms.pop('operation')} on {terms.pop('axis')}"
        terms.pop("shape", None)
        words = [f"{terms.pop('dtype')} {self.shape}"] if "dtype" in terms else []
        words += [f"takes {self.takes}"] if self.takes is not None else []
        words += [f"{term} {value}" for term, value in terms.items() if value is not None]
        return f"{name}({', '.join(words)})"

    def differs(self, other: Call) -> list[str]:
        """The names of what is not as it must be between the two."""
        mine, theirs = self.terms, other.terms
        found = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
        if found[:1] == ["operation"]:
            return ["operation"]
        if not found and self.takes is not None and not (self.gives_what(other) and other.gives_what(self)):
            return [f"what ranks {self.ranks[self.index]} and {other.ranks[other.index]} exchange"]
        return found

    def gives_what(self, other: Call) -> bool:
        """Whether the other's block is of the shape that it expects (a list too short is refused elsewhere)."""
        mine, theirs = self.shape[other.index:other.index + 1], other.takes[self.index:self.index + 1]
        return mine == theirs or not mine or not theirs


def terms_of(operation: str, x, axis, options: dict) -> tuple[dict, list, list | None]:
    """(what must be the same on all ranks, the shape of x or of its blocks, the shapes of the blocks expected).

    Nothing is refused here: what makes no sense is the same on all ranks, or a mismatch, or refused by the collective.
    """
    terms: dict[str, Any] = {"operation": operation, "axis": axis.name}
    if "shapes" in options:
        terms |= {"dtype": name_of(np.asarray(block).dtype) for block in x[:1]}
        terms |= {name: plain(value) for name, value in options.items() if name != "shapes"}
        return terms, [list(np.shape(block)) for block in x], plain(options["shapes"])
    if x is None:
        return terms, [], None
    x = x if isinstance(x, np.ndarray) else np.asarray(x)
    shape = list(x.shape)
    terms |= {"dtype": name_of(x.dtype), "shape": shape} | {name: plain(value) for name, value in options.items()}
    for dim, sizes in CUT.items():
        if sizes in terms and isinstance(terms.get(dim), int) and -x.ndim <= terms[dim] < x.ndim:
            terms[dim] %= x.ndim
            terms[sizes] = shares(x.shape[terms[dim]], axis.size) if terms[sizes] is None else terms[sizes]
            terms["shape"] = [sizes if place == terms[dim] else length for place, length in enumerate(terms["shape"])]
    return terms, shape, None


@cache
def name_of(dtype) -> str:
    """A dtype's name; numpy builds it anew each time."""
    return dtype.name


def plain(value):
    """An option as it is compared: [2, 1] for a tuple, an array or a list, 2 for a number of numpy, "add" for np.add, its name for an
    algorithm."""
    if isinstance(value, np.ufunc):
        return value.__name__
    if hasattr(value, "name"):
        return value.name
    if isinstance(value, (list, tuple, np.ndarray)):
        return [one if type(one) is int else plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


class Calls:
    """What one rank called: how often on each group, with a check sum over all terms, and its last calls."""

    def __init__(self):
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.sums: dict[tuple[int, ...], int] = {}
        self.names: dict[tuple[int, ...], str] = {}
        self.last: deque[Call] = deque(maxlen=REMEMBERED)

    def add(self, operation: str, x, axis, options: dict, site: Site) -> Call:
        """This rank begins a collective."""
        terms, shape, takes = terms_of(operation, x, axis, options)
        call = Call(axis.ranks, axis.index, self.counts[axis.ranks], terms, shape, takes, site)
        self.counts[axis.ranks] += 1
        self.sums[axis.ranks] = zlib.crc32(str(terms).encode(), self.sums.get(axis.ranks, 0))
        self.names[axis.ranks] = axis.name
        self.last.append(call)
        return call


class Roll:
    """Compares the calls of all ranks of one process as they come, before any message is sent for them."""

    def __init__(self):
        self.open: dict[tuple, dict[int, Call]] = {}        # (ranks, number) -> the calls of those who have come

    def add(self, call: Call):
        """A rank comes; Mismatch where its call is not that of those before it."""
        come = self.open.setdefault((call.ranks, call.number), {})
        come[call.index] = call
        found = next((found for other in come.values() if (found := other.differs(call))), None)
        if found:
            raise Mismatch(mismatch_text(list(come.values()), found))
        if len(come) == len(call.ranks):
            del self.open[call.ranks, call.number]


def same_errand(one: Errand, other: Errand) -> bool:
    """Whether the two ends of a message may belong together: to the same call, or both to none and not to two axes."""
    if one.call and other.call:
        return (one.call.ranks, one.call.number) == (other.call.ranks, other.call.number)
    return not one.call and not other.call and (one.axis == other.axis or None in (one.axis, other.axis))


def mismatch_text(calls: list[Call], found: list[str]) -> str:
    """The report: what differs, and what each rank called.  calls: all with the same group and number."""
    first = calls[0]
    lines = [f"mismatch: {ranks_text(first.ranks)} must make the same calls on {first.terms['axis']}, and their calls "
             f"number {first.number + 1} there differ in {', '.join(found)}"]
    lines += [f"rank {call.ranks[call.index]} calls {call}  ({call.site})" for call in sorted(calls, key=lambda call: call.index)]
    return "\n  ".join(lines)


def different(remembered: list[Call]) -> str | None:
    """The report of the earliest calls of several ranks that have the same group and number and are not the same; or None."""
    together: dict[tuple, list[Call]] = {}
    for call in sorted(remembered, key=lambda call: call.number):
        together.setdefault((call.ranks, call.number), []).append(call)
    for calls in together.values():
        found = next((found for i, one in enumerate(calls) for other in calls[:i] if (found := other.differs(one))), None)
        if found:
            return mismatch_text(calls, found)
    return None


def disagreement(ranks: list[Calls]) -> str | None:
    """The report of a run in which the ranks of a group did not make the same calls, after all have returned; or None."""
    told = different([call for calls in ranks for call in calls.last])
    groups = {} if told else {group: name for calls in ranks for group, name in calls.names.items()}
    for group, axis in groups.items():
        counts = {rank: ranks[rank].counts[group] for rank in group}
        if len(set(counts.values())) > 1:
            lines = [f"mismatch: {ranks_text(group)} must make the same calls on {axis}, and not all have made as many"]
            for rank, count in counts.items():
                last = [call for call in ranks[rank].last if call.ranks == group and call.number + 1 == count]
                lines += [f"rank {rank} made {count}" + "".join(f", the last {call}  ({call.site})" for call in last)]
            return "\n  ".join(lines)
        if len({ranks[rank].sums.get(group) for rank in group}) > 1:
            return (f"mismatch: {ranks_text(group)} have made {counts[group[0]]} calls each on {axis}, and not the same ones; of "
                    f"their last {REMEMBERED}, which are remembered, none differs")
    return told
