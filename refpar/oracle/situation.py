"""A situation: everything that a run of the oracle depends on, frozen, and printable as the command that repeats it.

The same situation gives the same batches on any mesh, because every array is a pure function of it.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

from refpar import corpus, reading
from refpar.config import AXES, FILLINGS, PRESETS, Layout, Model, Training
from refpar.named import describe_model
from refpar.oracle.packed import packed

OPTIONS = ("steps", "rows", "sequence", "micro_batches", "optimizer", "rate", "clip", "seed", "dtype")    # of verify, and of Training
PROOF = Training(steps=2, rows=8, sequence=64, warmup=0, rate=1e-2, clip=0.5, dtype="float64")


@dataclass(frozen=True)
class Situation:
    """One model on one mesh, with its batches.

    `last_rows`: rows of the last step, where it is an incomplete window (0: as many as the others).
    `documents`: lengths of the random documents that the rows are packed with, over and over; none: windows of the default text.
    `ignored`: the share of each row's targets to ignore, over and over, so that rows, and whole ranks, may have no target.
    """
    model: Model = PRESETS["llama-tiny"]
    layout: Layout = Layout()
    training: Training = PROOF
    last_rows: int = 0
    documents: tuple[int, ...] = ()
    ignored: tuple[float, ...] = (0.0,)

    def rows(self, step: int) -> int:
        """Rows of step 0, 1, ...: the last may have fewer."""
        last = step == self.training.steps - 1
        return self.last_rows if self.last_rows and last else self.training.rows

    def batch(self, step: int, rows: slice = slice(None)) -> corpus.Batch:
        """Some rows of one step's batch."""
        training = self.training
        if not self.documents:
            return corpus.batch(_default_text(training.sequence), dataclasses.replace(training, rows=self.rows(step)), step, rows)
        return packed([training.seed, step], self.rows(step), training.sequence, self.model.vocab, self.documents,
                             self.ignored, step).cut(rows)

    def command(self) -> str:
        """The command line that repeats it."""
        words = ["python -m refpar verify", f"--model {describe_model(self.model)}", f"--mesh {self.layout}"]
        for name in OPTIONS:
            if getattr(self.training, name) != getattr(PROOF, name):
                words.append(f"--{name.replace('_', '-')} {getattr(self.training, name)}")
        if self.layout.order != AXES:
            words.append(f"--order {','.join(self.layout.order)}")
        for flag, field in FILLINGS.items():
            value = getattr(self.layout, field)
            if value != getattr(Layout(), field):
                words.append(f"--{flag}" if value is True else f"--{flag} {value}")
        if self.last_rows:
            words.append(f"--last-rows {self.last_rows}")
        if self.documents:
            words.append(f"--documents {','.join(map(str, self.documents))}")
        if any(self.ignored):
            words.append(f"--ignored {','.join(map(str, self.ignored))}")
        return " ".join(words)

    def longest_sum(self) -> int:
        """n of the bound: the longest sum behind any value of the run, over tokens or over a dim of the model."""
        model, training = self.model, self.training
        return max(training.rows * training.sequence, model.width, model.ffn, model.sizes["V"], model.heads * model.head_width,
                   model.ssm_heads * model.ssm_head_width, model.inner)


@cache
def _default_text(sequence: int) -> corpus.Corpus:
    return reading.load(None, sequence)
