"""What is told when a run goes wrong: who waits for whom, and who sent what that nobody received."""
from __future__ import annotations

import os
from typing import NamedTuple

ROOM = os.path.dirname(__file__)
WIRES = {os.path.join(ROOM, name) for name in ("wire.py", "mesh.py", "threads.py", "mpi.py", "board.py", "report.py")}


class Wait(NamedTuple):
    """One rank that cannot go on."""
    what: str       # such as "recv(16 bytes, tag 0) from rank 1"
    peer: int       # the rank that it waits for
    place: str      # the line of its program


def deadlock_text(waits: dict[int, Wait], ended: list[int], unreceived: list[str]) -> str:
    """The report of a deadlock.  waits: by rank.  ended: the ranks whose program has returned.  unreceived: from `letters_text`."""
    lines = ["deadlock: no rank can go on"]
    for rank in sorted([*waits, *ended]):
        if rank in waits:
            what, peer, where = waits[rank]
            lines.append(f"rank {rank} waits in {what}{', which has returned' if peer in ended else ''}  ({where})")
        else:
            lines.append(f"rank {rank} has returned")
    ring = cycle({rank: wait.peer for rank, wait in waits.items()})
    if ring:
        lines.append("each waits for the next: " + " -> ".join(map(str, ring)))
    return "\n  ".join(lines + [f"sent but not received: {text}" for text in unreceived])


def cycle(waits_for: dict[int, int]) -> list[int]:
    """A cycle of rank -> rank, its first rank repeated at its end; empty if there is none.  The smallest rank on it begins."""
    for start in sorted(waits_for):
        path = [start]
        while waits_for.get(path[-1]) is not None and waits_for[path[-1]] not in path:
            path.append(waits_for[path[-1]])
        if waits_for.get(path[-1]) == start:
            return [*path, start]
    return []


def letters_text(messages: int, nbytes: int, source: int, to: int, tag: int) -> str:
    """Messages under way, in words."""
    number = "1 message" if messages == 1 else f"{messages} messages"
    return f"{number} from rank {source} to rank {to}, tag {tag}, {nbytes} bytes"


def place(frame) -> str:
    """Where a rank waits: the innermost line of its program outside the wires."""
    while frame is not None and frame.f_code.co_filename in WIRES:
        frame = frame.f_back
    if frame is None:
        return "at an unknown line"
    return f"{os.path.basename(frame.f_code.co_filename)} line {frame.f_lineno}, in {frame.f_code.co_name}"


def leftovers(books: list[dict]) -> list[str]:
    """One line for each (sender, receiver, tag) whose books differ.  books: `Wire.books` of every rank, all having returned."""
    found = []
    for rank, mine in enumerate(books):
        for (way, peer, tag), (messages, nbytes) in sorted(mine.items()):
            got_messages, got_bytes = books[peer].get(("recv", rank, tag), (0, 0))
            if way == "send" and messages > got_messages:
                found.append(letters_text(messages - got_messages, nbytes - got_bytes, rank, peer, tag))
    return found
