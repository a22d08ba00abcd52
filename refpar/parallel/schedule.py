"""A pipeline schedule is data: for each rank a list of steps, and a map of which rank holds which stage (law 11).

A step is a tuple of ops that run as one: what they need is received before it, what they make is sent after it.  Nearly all steps
have one op; DualPipe's pair, a forward and a backward of two directions that hide each other's messages, has two.  An op is a

    kind        F forward, B backward to the activations, W the weight gradients that B left (law 1), or BW: both, an ordinary backward
    stage       counted over the whole pipeline: "virtual", because a rank may hold several
    micro       the micro-batch
    slice       of the sequence (TeraPipe), 0 where it is whole

and prints as `2F0`: stage 2, forward, micro-batch 0; slice 1 of it is `2F0.1`; a pair is joined, `3F2+4BW0`.  A model may have
`copies`, that of DualPipe's second direction: stages 0 to depth-1 are the first copy, the next depth the second, and micro-batch i
goes through copy i modulo copies.  `refpar/schedules/` makes schedules and parses them.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, NamedTuple

class Op(NamedTuple):
    """One piece of work of one stage on one micro-batch, or on a slice of it."""
    kind: str
    stage: int
    micro: int
    slice: int = 0

    def __str__(self):
        return f"{self.stage}{self.kind}{self.micro}" + (f".{self.slice}" if self.slice else "")

    @property
    def parts(self) -> list[Op]:
        """The pieces that others may need: BW is a B and a W, any other op is itself."""
        return [self._replace(kind=letter) for letter in self.kind]


Step = tuple[Op, ...]


@dataclass(frozen=True)
class Schedule:
    """rows: the steps of each rank.  places: stage -> rank.  bound: how many ops' activations each rank may hold, from F to W.
    backward: False where only F is run.  flush: False where a step of training does not end before the next begins (PipeDream)."""
    name: str
    rows: tuple[tuple[Step, ...], ...]
    places: tuple[int, ...]
    micros: int
    bound: tuple[int, ...]
    slices: int = 1
    copies: int = 1
    backward: bool = True
    flush: bool = True

    def __post_init__(self):
        ranks, stages = len(self.rows), len(self.places)
        if min(self.micros, self.slices, self.copies, ranks, stages) < 1 or stages % self.copies or len(self.bound) != ranks \
                or not set(self.places) <= set(range(ranks)):
            raise ValueError(f"schedule {self.name}: {self.micros} micro-batches of {self.slices} slices, places={self.places} in "
                             f"{self.copies} copies and bound={self.bound} do not fit {ranks} ranks")

    @property
    def depth(self) -> int:
        """Stages of one copy of the model: stage s runs its share s % depth of the layers."""
        return len(self.places) // self.copies

    def giver(self, op: Op) -> int | None:
        """The stage whose output this op takes; None at the pipeline's end, and for W."""
        return {"F": self._stage(op, -1), "W": None}.get(op.kind, self._stage(op, +1))

    def taker(self, op: Op) -> int | None:
        """The stage that takes this op's output; None at the pipeline's end, and for W."""
        return {"F": self._stage(op, +1), "W": None}.get(op.kind, self._stage(op, -1))

    def _stage(self, op: Op, step: int) -> int | None:
        return op.stage + step if 0 <= op.stage % self.depth + step < self.depth else None

    def needs(self, op: Op) -> list[Op]:
        """What must be done before this op: the giver's, the slice before (behind, in backward), and its own F or B."""
        if op.kind == "W":
            return [op._replace(kind="B")]
        letter, giver, slice = op.kind[0], self.giver(op), op.slice + (-1 if op.kind == "F" else 1)
        return [op._replace(kind=letter, stage=giver)] * (giver is not None) + \
            [op._replace(kind=letter, slice=slice)] * (0 <= slice < self.slices) + [op._replace(kind="F")] * (letter == "B")

    def ops(self) -> Iterator[tuple[int, int, Op]]:
        """(rank, index of the step, op) of every op."""
        return ((rank, at, op) for rank, row in enumerate(self.rows) for at, step in enumerate(row) for op in step)

    def grid(self, marked: frozenset = frozenset()) -> str:
        """A row for each rank, a column for each of its steps; the (rank, index) in `marked` stand in brackets."""
        cells = [[f"[{text(step)}]" if (rank, at) in marked else text(step) for at, step in enumerate(row)]
                 for rank, row in enumerate(self.rows)]
        widths = [max((len(row[at]) for row in cells if at < len(row)), default=0) for at in range(max(map(len, cells)))]
        return "\n".join(" ".join([f"{rank}:", *(f"{cell:<{widths[at]}}" for at, cell in enumerate(row))]).rstrip()
                         for rank, row in enumerate(cells))

    def __str__(self):
        numbers = {"micros": self.micros, "slices": self.slices, "copies": self.copies, "backward": int(self.backward),
                   "flush": int(self.flush), "places": ",".join(map(str, self.places)), "bound": ",".join(map(str, self.bound))}
        return f"schedule {self.name} " + " ".join(f"{name}={value}" for name, value in numbers.items()) + f"\n{self.grid()}"


def text(step: Step) -> str:
    """A step as it prints: `2F0`, or `3F2+4BW0`."""
    return "+".join(map(str, step))
