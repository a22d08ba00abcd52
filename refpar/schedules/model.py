"""A rank's part of a model on a mesh, whatever its axes: what `train.train_step` needs."""
from __future__ import annotations

from typing import Callable

import numpy as np

from refpar.config import Model, Training
from refpar.nn.chain import Chain
from refpar.schedules.check import check
from refpar.parallel.data import accumulate
from refpar.parallel.fill import model, tokens_here
from refpar.parallel.pipeline import pipelined
from refpar.schedules.generate import generate


def part_of_model(config: Model, mesh, training: Training, chain: Chain | None = None) -> tuple[Chain, Callable]:
    """(this rank's part of the chain, the work of a step on it).  `chain`: the whole, where it is not `fill.model`'s own."""
    layout = mesh.layout
    chain = chain or model(config, mesh, training.seed)
    if layout.pp == 1 and layout.schedule == "1f1b":
        return chain, accumulate                                # no pipeline
    schedule = generate(layout.schedule, layout.pp, training.micro_batches, layout.virtual_stages or None, layout.slices or None)
    check(schedule)
    return pipelined(chain, schedule, mesh, tokens_here(mesh), np.dtype(training.dtype), layout.stages_by_cost)
