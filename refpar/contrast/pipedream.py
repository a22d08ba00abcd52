"""PipeDream: a pipeline that never waits, and so is not the same step.

There is no end of a step: each stage updates its weights after every micro-batch, and the next forward uses what there is.  A micro-batch
meets other versions of the weights on each stage, so each stage keeps the version that F used until B has used it too (weight stashing);
then its gradient is that of *some* function, though of no model that ever stood in one place:

    stage s of p runs F of micro-batch i with the weights that its first max(0, i - (p-1-s)) updates have made

`delayed` is the same in one process, a loop with delayed gradients, and judges the pipeline.  Neither equals training step by step.

Source: Narayanan et al. 2019, "PipeDream: generalized pipeline parallelism for DNN training".
"""
from __future__ import annotations

from refpar.nn.chain import Chain, backward, forward, gradients, start
from refpar.nn.gradient import zeros_like
from refpar.parallel.pipeline import Pipeline
from refpar.parallel.stages import stage, stage_layers


def descended(params: dict, grads: dict, rate: float) -> dict:
    """One step of plain gradient descent."""
    return {layer: {name: w - rate * grads[layer][name] for name, w in group.items()} for layer, group in params.items()}


class Asynchronous(Pipeline):
    """The runner, with an update after each backward.  `rate`: how far.  versions: of the weights that were kept, at most at one time.

    ValueError for a schedule that ends each step, and for a tied table, of which two stages would have two versions."""
    rate, versions = 0.1, 0

    def __init__(self, schedule, stages, *given):
        super().__init__(schedule, stages, *given)
        self.stash = {}
        if schedule.flush:
            raise ValueError(f"PipeDream has no end of a step, and schedule {schedule.name} has one: generate it as pipedream")
        tied = [mine for chain in stages.values() for mine in chain.ties]
        if tied:
            raise ValueError(f"PipeDream: {'.'.join(tied[0])} is tied, and its two stages would have two versions of it")

    def forward(self, op, x):
        """F with the newest weights, which B will use too."""
        self.stash[op.micro] = self.params
        self.versions = max(self.versions, len(self.stash))
        return super().forward(op, x)

    def backward(self, op, dy):
        """B with the weights of its F."""
        newest, self.params = self.params, self.stash.pop(op.micro)
        dx = super().backward(op, dy)
        self.params = newest
        return dx

    def multiply(self, op, _=None):
        """W, and the update."""
        grads = gradients(self.stages[op.stage], self.products.pop(op[1:]))
        self.params = descended(self.params, grads, self.rate)


def two_buffered(gradients_of, params: dict, steps: int, rate: float) -> list[dict]:
    """PipeDream-2BW: gradients of a whole step are taken with the weights before the last update, so that two versions are enough.

    gradients_of(params, step) -> gradients, by any pipeline or none.  -> the weights after each step:
    w[t+1] = w[t] - rate g(w[t-1]), and g(w[0]) in the first.  Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training".
    """
    older, newest, told = params, params, []
    for step in range(steps):
        older, newest = newest, descended(newest, gradients_of(older, step), rate)
        told.append(newest)
    return told


def delayed(chain: Chain, params: dict, batches: list, counts: int, stages: int, rate: float) -> dict:
    """The judge: the weights after all micro-batches, each stage's as `max(0, i - (p-1-s))` updates had made them when i came.

    No table may be tied: its two stages would have two versions of it.
    """
    parts = [stage(chain, layers) for layers in stage_layers(chain, stages)]
    versions = [[{name: params[name] for name, _ in part.layers}] for part in parts]
    for i, batch in enumerate(batches):
        used = [versions[s][max(0, i - (stages - 1 - s))] for s in range(stages)]
        x, kept = batch.tokens, []
        for part, mine in zip(parts, used):
            x, after, saved = forward(part, x, mine, batch, start(part, mine, batch))
            kept.append((after, saved))
        _, of_loss = chain.loss.forward(x, batch.targets)
        dy = chain.loss.backward(1.0 / counts, of_loss)
        for s in reversed(range(stages)):
            after, saved = kept[s]
            dy, _, products = backward(parts[s], dy, saved, used[s], batch, zeros_like(after))
            versions[s].append(descended(versions[s][-1], gradients(parts[s], products), rate))
    return {name: group for of_stage in versions for name, group in of_stage[-1].items()}
