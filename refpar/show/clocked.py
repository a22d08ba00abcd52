"""A schedule obeyed by the real program in virtual time: a small model's step, where F, B and W take given times."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from refpar.clock import ClockWorld, Link, everywhere, given
from refpar.comm.mesh import Mesh
from refpar.config import PRESETS, Layout, Training
from refpar.corpus import micro_batches
from refpar.nn.init import initial
from refpar.oracle.packed import packed
from refpar.schedules.model import part_of_model
from refpar.schedules.simulate import Costs
from refpar.trace import write


def one_step(wire, layout: Layout, micros: int):
    """This rank's work of one step of `micros` rows."""
    mesh, model = Mesh(layout, wire), replace(PRESETS["llama-uneven"], blocks=2)
    chain, work = part_of_model(model, mesh, Training(rows=micros, sequence=4, micro_batches=micros, dtype="float64"))
    batch = packed([0], micros, 4, model.vocab)
    rows = [batch.cut(part) for part in micro_batches(micros, 1, 0, micros)]
    work(chain, initial(model, chain, 0, np.float64), [one._replace(whole=one) for one in rows], batch.count)


MOST = 64               # ranks: each is a thread that runs a model


def check(layout: Layout):
    """ValueError, one sentence, where that is too large a run."""
    if layout.pp > MOST:
        raise ValueError(f"--trace runs the program, and pp={layout.pp} is more than the {MOST} stages that it does that for")


def run(layout: Layout, micros: int, costs: Costs) -> ClockWorld:
    """The world after one step of the layout's stages."""
    times = {kind: getattr(costs, kind) for kind in "FBW"}
    world = ClockWorld(everywhere(Link(latency=costs.latency)), given(times), eager=2**31)       # messages as the simulation has them
    world.run(one_step, layout.pp, replace(layout, dp=1, cp=1, tp=1, sp=False, tp_ring=False), micros)
    return world


def record(layout: Layout, micros: int, costs: Costs, path: Path):
    """Write what every rank did, and when, for chrome://tracing or ui.perfetto.dev: one unit is a second."""
    write(path, run(layout, micros, costs).events)
