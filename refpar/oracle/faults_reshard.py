"""Faults of checkpoints and of resharding: elements in a wrong place, under the right name, in the right shape.

As in `faults.py`.  Equal layouts before and after hide them all, even shards most of them.
"""
from __future__ import annotations

from dataclasses import replace

from refpar.config import PRESETS, Layout
from refpar.oracle.plant import Fault
from refpar.oracle.properties_reshard import ReshardSituation

LLAMA, MAMBA = replace(PRESETS["llama-tiny"], blocks=1), replace(PRESETS["mamba2-tiny"], blocks=1)    # 2 key heads; 2 groups
ROOM = "refpar.parallel.reshard"


def between(before: Layout, after: Layout, model=LLAMA) -> ReshardSituation:
    """From one layout to another."""
    return ReshardSituation(model, before, after)


UNEVEN = between(Layout(tp=3), Layout(tp=2))
EVEN = between(Layout(tp=2), Layout(dp=2, tp=2))
ALONE = between(Layout(), Layout())
RUNS = between(Layout(tp=4), Layout(tp=2))

RESHARDING = (
    Fault("total-of-copies", "sgl-project/sglang#19086",
          "the heads in all are taken to be the local ones times the ranks, though several ranks hold copies of one",
          f"{ROOM}:held", "range(piece.start, piece.stop) for piece in part(model, dims, layout, where)",
          'range(at * (piece.stop - piece.start), (at + 1) * (piece.stop - piece.start)) for at, piece in zip('
          '(where["tp"] if "/" in word else 0 for word in dims.split()), part(model, dims, layout, where))',
          RUNS, EVEN, "reshard_is_cutting"),
    Fault("offsets-of-padded-parts", "deepspeedai/DeepSpeed#5105",
          "the offset of what arrives is counted as if every part were as long as mine: the padding of uneven parts is forgotten",
          f"{ROOM}:within", "slice(x.start - y.start, x.stop - y.start)",
          "slice(x.start - y.start // max(1, len(y)) * len(y), x.stop - y.start // max(1, len(y)) * len(y))",
          UNEVEN, EVEN, "reshard_is_cutting"),
    Fault("parts-end-to-end", "NVIDIA-NeMo/Megatron-Bridge#2013",
          "the parts are laid end to end, though each holds some of every block: gate 0, up 0, gate 1, up 1",
          f"{ROOM}:_travel", "into[within(box, wanted)] = request.array",
          "into.reshape(into.size)[into.size - request.array.size:] = request.array.reshape(request.array.size)",
          EVEN, ALONE, "reshard_is_cutting"),
    Fault("replicas-of-their-own", "NVIDIA-NeMo/Automodel#3822",
          "replicated weights start from each rank's own seed; one copy is saved and given to all, and the model is another",
          "refpar.fit:fresh", "plan.training.seed, np.dtype", "plan.training.seed + mesh.wire.rank, np.dtype", EVEN, ALONE,
          "fresh_is_cutting"),
    Fault("moments-forgotten", "areal-project/AReaL#1468",
          "a run is resumed with the weights of its checkpoint, and the optimizer's moments silently start again from zero",
          "refpar.fit:begun", "state = State(**checkpoint.load(start.checkpoint)[0])",
          'weights = checkpoint.load(start.checkpoint)[0]["params"]\n'
          "        state = State(weights, zeros_like(weights), zeros_like(weights), start.step)", EVEN, None, "loading_is_cutting"),
)
