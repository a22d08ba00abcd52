"""Real faults of pipelines, and of the gradient's norm over a mesh, as data (see `faults.py`)."""
from __future__ import annotations

from dataclasses import replace

from refpar.config import PRESETS, Layout, Model
from refpar.oracle.plant import Fault
from refpar.oracle.situation import PROOF, Situation

LLAMA = replace(PRESETS["llama-uneven"], blocks=1)
TIED = replace(LLAMA, tied=True)


def run(model: Model = LLAMA, **layout) -> Situation:
    """A short run on at most 4 ranks, in 3 micro-batches."""
    return Situation(model, Layout(**layout), replace(PROOF, rows=5, sequence=9, micro_batches=3), 0, (5, 16), (0.0, 0.4))


LONG = Situation(LLAMA, Layout(pp=2, schedule="interleaved"), replace(PROOF, steps=1, rows=24, sequence=64, micro_batches=4))   # messages
MASTER, RUNNER, PLACEMENT = "sharded_equals_single", "refpar.parallel.pipeline:Pipeline", "refpar.parallel.placement"

PIPELINES = (
    Fault("normalised-after-backward", "pytorch/torchtitan#2972",
          "the loss that is reported is divided by the number of targets, when the schedule has run backward without it",
          f"{RUNNER}.__init__", "1.0 / max(count, 1)", "1.0", run(pp=2), run(dp=2), MASTER),
    Fault("divided-by-micro-batches", "areal-project/AReaL#1273",
          "gradients are divided by the number of targets, and by the pipeline's helper by the number of micro-batches",
          f"{RUNNER}.__init__", "1.0 / max(count, 1)", "1.0 / max(count, 1) / schedule.micros", run(pp=2), run(dp=2), MASTER),
    Fault("copies-of-the-table-drift-apart", "uw-syfi/piper#13",
          "first and last stage hold a copy of the tied table, and the gradients of the copies are not summed",
          "refpar.parallel.stages:holders", "found[owner] |= of_layer[layer]", "found[owner] |= set()",
          run(TIED, pp=2), run(pp=2), MASTER),
    Fault("buffer-sent-again", "NVIDIA/Megatron-LM#4047",
          "one buffer is used for all sends, and filled again before the last one has left",
          f"{RUNNER}.give", "request = self.pp.isend(np.ascontiguousarray(y), rank, self.tag(made))",
          "buffer = self.__dict__.setdefault('buffer', np.empty_like(y))\n        buffer[...] = y\n"
          "        request = self.pp.isend(buffer, rank, self.tag(made))", LONG, run(dp=2), MASTER),
    Fault("norm-counts-copies", "NVIDIA-NeMo/RL#3788",
          "squares of parameters that every rank holds are summed over ranks as if they were shards",
          f"{PLACEMENT}:is_first", "return all(here[axis] == index for axis, index in first.items())", "return True",
          run(tp=2), run(dp=2), MASTER),
    Fault("norm-of-one-shard", "deepspeedai/DeepSpeed#5411",
          "one flag lets the first rank of tp alone give its squares, of its shards too",
          f"{PLACEMENT}:is_first", '{"tp": here["tp"] if "tp" in shard_axes(dims) else 0, "pp": 0}', '{"tp": 0, "pp": 0}',
          run(tp=2), run(dp=2), MASTER),
)
