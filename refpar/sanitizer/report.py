"""What is told when a run goes wrong: who waits for whom, and who sent what that nobody received."""
from __future__ import annotations

import os
from typing import NamedTuple

from refpar import watch

HERE = os.path.dirname(__file__)
ROOM = os.path.join(os.path.dirname(HERE), "comm")              # whose frames are not the program's
WIRES = {os.path.join(ROOM, name) for name in ("wire.py", "mesh.py", "threads.py", "mpi.py")} | {os.path.join(HERE, "board.py"), __file__}
NONE = ", for no collective"


class Site(NamedTuple):
    """A line of somebody's program."""
    file: str
    line: int
    function: str

    def __str__(self):
        return f"{os.path.basename(self.file)} line {self.line}, in {self.function}" if self.file else "at an unknown line"


class Wait(NamedTuple):
    """One rank that cannot go on."""
    what: str       # such as "recv(16 bytes, tag 0) from rank 1"
    peer: int       # the rank that it waits for
    place: str      # the line where it waits
    call: str = ""  # the collective of which that is a part


def wait_of(request, where: Site) -> Wait:
    """A rank that waits for `request`, at that line."""
    call = request.errand.call
    return Wait(str(request), request.peer, str(where), f"{call}  ({call.site})" if call else "")


def deadlock_text(waits: dict[int, Wait], ended: list[int], unreceived: list[str]) -> str:
    """The report of a deadlock.  waits: by rank.  ended: the ranks whose program has returned.  unreceived: from `letters_text`."""
    lines = ["deadlock: no rank can go on"]
    for rank in sorted([*waits, *ended]):
        if rank in waits:
            what, peer, where, call = waits[rank]
            lines.append(f"rank {rank} waits in {what}{', which has returned' if peer in ended else ''}  ({where})"
                         + (f", for {call}" if call else ""))
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


def outside_wires(frame):
    """The innermost frame of a rank's program outside the wires; None where there is none."""
    while frame is not None and frame.f_code.co_filename in WIRES:
        frame = frame.f_back
    return frame


def site(frame) -> Site:
    """The innermost line of a rank's program outside the wires: where a message is posted or waited for."""
    frame = outside_wires(frame)
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else Site("", 0, "")


def site_of_call(frame) -> Site:
    """The innermost line outside `comm` and `watch`: where a collective is called."""
    while frame is not None and (frame.f_code.co_filename.startswith((ROOM, HERE)) or frame.f_code.co_filename == watch.__file__):
        frame = frame.f_back
    return site(frame)


def buffer_text(array, frame) -> str:
    """An array as the program knows it: by name, if one of its functions has one for it.  frame: where to begin to look."""
    frame, name = outside_wires(frame), ""
    while frame is not None and not name:
        name = next((name for name, value in frame.f_locals.items() if value is array), "")
        frame = frame.f_back
    return f"{name or 'an array'}, {array.dtype} {list(array.shape)}"


def errand_text(errand: watch.Errand) -> str:
    """What a message belongs to: the end of a sentence, which may be nothing."""
    if errand.call:
        return f", for {errand.call}  ({errand.call.site})"
    return f", on {errand.axis}" if errand.axis else ""


def ends_text(send, receive) -> str:
    """The two ends of a message, a line each, from the two requests."""
    return "".join(f"\n  rank {end.wire.rank} {verb} {in_words(end.array)}  ({end.site}){errand_text(end.errand) or NONE}"
                   for end, verb in ((send, "sends"), (receive, "receives")))


def in_words(array) -> str:
    """Size, dtype and bytes of a message."""
    return f"{array.size} x {array.dtype} ({array.nbytes} bytes)"


def ranks_text(ranks) -> str:
    """"rank 3", "ranks 0 and 1", "ranks 0, 1 and 2"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def leftovers(books: list[dict]) -> list[str]:
    """One line for each (sender, receiver, tag) whose books differ.  books: `Wire.books` of every rank, all having returned."""
    found = []
    for rank, mine in enumerate(books):
        for (way, peer, tag), (messages, nbytes, _) in sorted(mine.items()):
            got_messages, got_bytes, _ = books[peer].get(("recv", rank, tag), (0, 0, 0))
            if way == "send" and messages > got_messages:
                found.append(letters_text(messages - got_messages, nbytes - got_bytes, rank, peer, tag))
    return found


def other_dtypes(books: list[dict]) -> list[str]:
    """One line for each (sender, receiver, tag) where as many bytes arrived as were sent, but integers for floats or the like."""
    return [f"of {letters_text(messages, nbytes, rank, peer, tag)}" for rank, mine in enumerate(books)
            for (way, peer, tag), (messages, nbytes, kinds) in sorted(mine.items())
            if way == "send" and books[peer]["recv", rank, tag][2] != kinds]
