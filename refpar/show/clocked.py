"""A schedule obeyed by the real program in virtual time: a small model's step, where F, B and W take one unit each."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from refpar.clock import ClockWorld, given
from refpar.comm.mesh import Mesh
from refpar.config import PRESETS, Layout, Training
from refpar.corpus import micro_batches
from refpar.nn.init import initial
from refpar.oracle.packed import packed
from refpar.schedules.model import part_of_model
from refpar.trace import write


def one_step(wire, layout: Layout, micros: int):
    """This rank's work of one step of `micros` rows."""
    mesh, model = Mesh(layout, wire), replace(PRESETS["llama-uneven"], blocks=2)
    chain, work = part_of_model(model, mesh, Training(rows=micros, sequence=4, micro_batches=micros, dtype="float64"))
    batch = packed([0], micros, 4, model.vocab)
    rows = [batch.cut(part) for part in micro_batches(micros, 1, 0, micros)]
    work(chain, initial(model, chain, 0, np.float64), [one._replace(whole=one) for one in rows], batch.count)


def record(layout: Layout, micros: int, path: Path):
    """Write what every rank did, and when, for chrome://tracing or ui.perfetto.dev: one unit is a second."""
    world = ClockWorld(seconds=given({"F": 1, "B": 1, "W": 1}))
    world.run(one_step, layout.pp, replace(Layout(pp=layout.pp), schedule=layout.schedule, virtual_stages=layout.virtual_stages,
                                           slices=layout.slices), micros)
    write(path, world.events)
