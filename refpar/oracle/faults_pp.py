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
ONE_PLACE, HOLDS = "pipeline_equals_one_place", "in_flight_is_the_formula"

PIPELINES = (
    Fault("normalised-after-backward", "pytorch/torchtitan#2972",
          "the loss that is reported is divided by the number of targets, when the schedule has run backward without it",
          f"{RUNNER}.__init__", "1.0 / max(count, 1)", "1.0", run(pp=2), run(dp=2), MASTER),
    Fault("divided-by-micro-batches", "areal-project/AReaL#1273",
          "gradients are divided by the number of targets, and by the pipeline's helper by the number of micro-batches",
          f"{RUNNER}.__init__", "1.0 / max(count, 1)", "1.0 / max(count, 1) / schedule.micros", run(pp=2), run(dp=2), ONE_PLACE),
    Fault("copies-of-the-table-drift-apart", "uw-syfi/piper#13",
          "first and last stage hold a copy of the tied table, and the gradients of the copies are not summed",
          "refpar.parallel.stages:holders", "found[owner] |= of_layer[layer]", "found[owner] |= set()",
          run(TIED, pp=2), run(pp=2), MASTER),
    Fault("layers-numbered-by-stage", "huggingface/transformers#24381",
          "a stage numbers its layers from 0: the second one has the first one's weights, and nobody has its own",
          "refpar.parallel.stages:on_rank", "held = tuple(layer for part in mine for layer in chain.layers[parts[part]])",
          "held = [layer for part in mine for layer in chain.layers[parts[part]]]\n"
          "    held = tuple((f\"{i}.{name.partition('.')[2]}\", layer) for i, (name, layer) in enumerate(held))",
          run(pp=2), run(dp=2), MASTER),
    Fault("warm-up-beyond-the-last", "pytorch/torchtitan#775",
          "a rank warms up with more micro-batches than there are, and waits for one that does not exist",
          "refpar.schedules.generate:generate", "kept := tuple(op for op in slot if op.micro < micros)", "kept := tuple(slot)",
          run(pp=2, schedule="interleaved"), run(pp=2), MASTER),
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

DROPPING = replace(LLAMA, dropout=0.3)

# What is divided where, who holds which layers, who talks to whom, and what is let go when.
SCHEDULED = (
    Fault("divided-at-each-call", "pytorch/torchtitan#1733",
          "what has been added up so far is divided by the number of micro-batches each time that one is added",
          f"{RUNNER}.multiply", "mine[name] = mine[name] + grad if name in mine else grad",
          "mine[name] = (mine[name] + grad) / self.schedule.micros if name in mine else grad",
          run(pp=2), replace(run(pp=2), training=replace(PROOF, rows=2, sequence=9)), ONE_PLACE),
    Fault("put-off-and-not-scaled", "pytorch/pytorch#164777",
          "the scale is given to a whole backward, and the weight gradients that are put off miss it",
          f"{RUNNER}.multiply", "mine = self.grads.setdefault(layer, {})",
          "mine = self.grads.setdefault(layer, {})\n"
          "            group = {name: grad * (self.schedule.micros if op.kind == 'W' else 1) for name, grad in group.items()}",
          run(pp=2, schedule="zb-h1"), run(pp=2), ONE_PLACE),
    Fault("offset-of-virtual-stages", "NVIDIA/Megatron-LM#1584",
          "the first layer of a virtual stage is counted as if a rank's stages were neighbours: layers run in another order",
          "refpar.parallel.pipeline:pipelined", "stage_layers(chain, schedule.depth, by_cost)\n",
          "stage_layers(chain, schedule.depth, by_cost)\n"
          "    parts = [parts[s % pp.size * len(parts) // pp.size + s // pp.size] for s in range(len(parts))]\n",
          run(replace(LLAMA, blocks=2), pp=2, schedule="interleaved"), run(pp=2), MASTER),
    Fault("waits-for-each-send", "pytorch/pytorch#172668",
          "a stage goes on when what it sent is received: neighbours that both send wait for each other, unless messages are short",
          f"{RUNNER}.give", "if made[:2] in self.sent:\n            self.sent[made[:2]].wait()\n        self.sent[made[:2]] = request",
          "request.wait()",
          LONG, run(pp=2, schedule="interleaved"), ONE_PLACE),
    Fault("partner-of-another-group", "sgl-project/sglang#29571",
          "the neighbouring stage is looked for as if tp alone stood between two stages, and cp stands there too",
          "refpar.comm.mesh:Mesh.axis", "mine = next(group for group in groups(self.layout, *axes) if self.wire.rank in group)",
          "mine = next(group for group in groups(self.layout, *axes) if self.wire.rank in group)\n"
          "        if axes == ('pp',):\n"
          "            first = self.wire.rank - self.coordinates()['pp'] * self.layout.tp\n"
          "            mine = [(first + stage * self.layout.tp) % self.layout.ranks for stage in range(self.layout.pp)]",
          run(pp=2, cp=2), run(pp=2), MASTER),
    Fault("norm-of-one-stage", "pytorch/torchtitan#596",
          "each stage clips by the norm of its own layers",
          f"{PLACEMENT}:squared_norm", 'mesh.axis("pp", "tp")', 'mesh.axis("tp")', run(pp=2), run(tp=2), MASTER),
    Fault("drawn-anew", "openai/guided-diffusion#167",
          "the forward that is run again for backward drops other elements than the first one did",
          "refpar.nn.recompute:recomputed", 'layer.forward(saved["x"], w, batch, saved["before"])',
          'layer.forward(saved["x"], w, batch._replace(step=batch.step + 1), saved["before"])',
          run(DROPPING, dp=2, recompute="full"), run(dp=2, recompute="full"), ONE_PLACE),
    Fault("kept-until-the-end", "pytorch/pytorch#159251",
          "what backward has used is not let go before the step ends: every schedule holds as much as GPipe",
          f"{RUNNER}.backward", "kept = self.kept.pop(place)", "kept = self.kept[place]", run(pp=2), run(pp=2, schedule="gpipe"), HOLDS),
)
