"""Real faults, as data: what people reported, retold as a change of one place in our text.

Each is killed by a general property on a situation that shows it, on at most 4 ranks, and is invisible to that property in the
situation that hides it: most hide where everything is equal, even, or alone, which is where tests like to look.
`python -m refpar verify --fault NAME` plants one, here and on every rank.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Callable

from refpar.config import PRESETS, Layout
from refpar.oracle import (properties, properties_comm, properties_cp, properties_loss, properties_nn, properties_pp,
                           properties_reshard, properties_state)
from refpar.oracle.faults_cp import CONTEXT_PARALLEL
from refpar.oracle.faults_pp import PIPELINES, SCHEDULED
from refpar.oracle.faults_reshard import RESHARDING
from refpar.oracle.faults_ssm import STATE_SPACE
from refpar.oracle.faults_tp import TENSOR_PARALLEL
from refpar.oracle.faults_state import STATE_OVER_RANKS
from refpar.oracle.plant import Fault
from refpar.oracle.situation import PROOF, Situation
from refpar.oracle.situation_comm import CommSituation

MODEL = replace(PRESETS["llama-uneven"], blocks=1)
ONE_DOCUMENT = (10_000,)            # every target counts


def run(dp: int, rows: int, micro_batches: int = 1, documents=(16,), ignored=(0.0,), last_rows=0, sequence=16) -> Situation:
    """A short run on at most 4 ranks; with documents as long as the rows, every row has the same number of targets."""
    training = replace(PROOF, rows=rows, sequence=sequence, micro_batches=micro_batches)
    return Situation(MODEL, Layout(dp=dp), training, last_rows, documents, ignored)


UNEQUAL = run(dp=2, rows=5, micro_batches=2, documents=(5, 16), ignored=(0.0, 0.7, 1.0))
ALONE = run(dp=1, rows=4)
EQUAL = run(dp=2, rows=4)
RING = CommSituation(Layout(tp=3))                                                      # uneven shards
EVEN_RING = CommSituation(Layout(tp=3), shape=(6, 3), sizes=(2, 2, 2), other_sizes=(1, 1, 1))
LONG_RING = CommSituation(Layout(tp=3), shape=(6, 9000), sizes=(2, 2, 2), other_sizes=(3000,) * 3,     # longer than eager messages
                          cases=("all_reduce ring", "reduce_scatter ring"))
LONE_RANK = CommSituation(Layout(), sizes=(5,), other_sizes=(4,))
PAIR = CommSituation(Layout(tp=2), shape=(4, 4), sizes=(2, 2), other_sizes=(2, 2))

MASTER = "sharded_equals_single"
DATA, TRAIN, NORM = "refpar.parallel.data", "refpar.train:train_step", "refpar.parallel.placement:squared_norm"

# Loss and gradient normalisation: a mean of means is no mean.
NORMALISATION = (
    Fault("mean-of-means", "meta-pytorch/torchtune#1875",
          "each micro-batch takes its own mean, and the means are averaged: the loss depends on how many micro-batches there are",
          f"{DATA}:accumulate",
          """loss_and_gradients(chain, params, batches[0], count)
    for batch in batches[1:]:
        more_loss, more_grads = loss_and_gradients(chain, params, batch, count)""",
          """loss_and_gradients(chain, params, batches[0], batches[0].count * len(batches))
    for batch in batches[1:]:
        more_loss, more_grads = loss_and_gradients(chain, params, batch, batch.count * len(batches))""",
          run(dp=1, rows=4, micro_batches=2, ignored=(0.0, 0.0, 0.9, 0.9)), run(dp=1, rows=4, micro_batches=2), MASTER),
    Fault("local-count", "huggingface/transformers#34242",
          "the targets are counted on each rank alone, and ranks count alike: a lone target weighs as much as a rank full of them",
          f"{DATA}:count_targets", 'int(all_reduce(np.array([mine]), mesh.axis("dp", "cp"))[0])', 'mine * mesh.axis("dp").size',
          UNEQUAL, ALONE, MASTER),
    Fault("wrong-axis", "NovaSky-AI/SkyRL#1420",
          "the group of a sum leaves out an axis on which the ranks hold other tokens",
          f"{DATA}:count_targets", 'mesh.axis("dp", "cp")', 'mesh.axis("cp")', EQUAL, ALONE, MASTER),
    Fault("full-window", "huggingface/transformers#39659",
          "the last window of an epoch is incomplete, and is divided by the size of a full one",
          TRAIN, "count_targets(batches, mesh)", "max(count_targets(batches, mesh), training.rows * training.sequence)",
          run(dp=2, rows=4, documents=ONE_DOCUMENT, last_rows=3), run(dp=2, rows=4, documents=ONE_DOCUMENT), MASTER),
    Fault("lost-tail", "NVIDIA-NeMo/Automodel#2257",
          "micro-batches that are not as large as the first never reach the optimizer",
          f"{DATA}:accumulate", "for batch in batches[1:]:",
          "for batch in [b for b in batches[1:] if b.tokens.shape == batches[0].tokens.shape]:",
          run(dp=1, rows=5, micro_batches=3), run(dp=1, rows=6, micro_batches=3), MASTER),
    Fault("late-sync", "karpathy/build-nanogpt#30",
          "the switch that puts the reduction off while gradients accumulate is still off when the window ends",
          TRAIN, "reduce_gradients(grads, chain, mesh)", "reduce_gradients(grads, chain, mesh) if len(batches) == 1 else grads",
          run(dp=2, rows=4, micro_batches=2), EQUAL, MASTER),
    Fault("overwritten", "allenai/open-instruct#1498",
          "each micro-batch's gradient takes the place of the ones before, and only the last survives",
          f"{DATA}:accumulate", "add(grads, more_grads)", "more_grads", run(dp=1, rows=4, micro_batches=2), EQUAL, MASTER),
    Fault("no-count", "radixark/miles#3231",
          "sums over tokens are averaged over ranks and never divided by the number of targets: the step's size moves with it",
          TRAIN, "state.params, batches, count)", 'state.params, batches, mesh.axis("dp").size)',
          EQUAL, run(dp=2, rows=2, documents=ONE_DOCUMENT, sequence=1), MASTER),
    Fault("divided-twice", "unslothai/unsloth-zoo#1023",
          "the loss is divided by the count of the whole window, and then again by the number of micro-batches",
          TRAIN, "state.params, batches, count)", "state.params, batches, count * len(batches))",
          run(dp=2, rows=4, micro_batches=2), EQUAL, MASTER),
    Fault("averaged", "EleutherAI/gpt-neox#1259",
          "gradients are averaged over ranks whose tokens are parts of one batch, where they must be added",
          f"{DATA}:reduce_gradients", "flat = all_reduce(flat, bucket.over.on(mesh))",
          "flat = all_reduce(flat, bucket.over.on(mesh)) / bucket.over.on(mesh).size", EQUAL, ALONE, MASTER),
    Fault("forgotten-norms", "NVIDIA/Megatron-LM#1446",
          "the weights of the norms are not on the list of what is reduced: replicas drift apart",
          f"{DATA}:reduce_gradients", "flat[at:at + grad.size].reshape(grad.shape)",
          "flat[at:at + grad.size].reshape(grad.shape) if grad.ndim > 1 else grad", EQUAL, ALONE, MASTER),
    Fault("lost-rows", "ml-explore/mlx-lm#1688",
          "a rank's share (there of layers, here of rows) starts at its number times its own size: some belong to nobody",
          "refpar.corpus:micro_batches", "mine = share(rows, ranks, rank)",
          "size = len(range(rows)[share(rows, ranks, rank)])\n    mine = slice(rank * size, (rank + 1) * size)",
          run(dp=3, rows=5), run(dp=3, rows=6), MASTER),
)

# The gradient's norm, and clipping by it.
CLIPPING = (
    Fault("norm-counted-twice", "modelscope/twinkle#290",
          "every rank has the whole gradient, and the squares are added up over the ranks again: too large a norm, too hard a clip",
          NORM, 'mesh.axis("pp", "tp")', 'mesh.axis("dp", "pp", "tp")', EQUAL, ALONE, MASTER),
    Fault("norm-of-the-largest", "facebookresearch/fairscale#167",
          "parts of the norm are combined by their maximum, as for the infinity norm, where their squares must be added",
          NORM, 'mesh.axis("pp", "tp")', 'mesh.axis("pp", "tp"), op=np.maximum', replace(EQUAL, layout=Layout(tp=2)), EQUAL, MASTER),
    Fault("norm-of-addends", "pytorch/pytorch#165962",
          "the norm is taken of each rank's addend and summed, before the addends themselves are: the norm is not linear",
          TRAIN,
          """    loss, grads = sum_loss(loss, mesh), reduce_gradients(grads, chain, mesh)
    watch.value("gradients", grads)
    norm = math.sqrt(squared_norm(grads, chain, mesh))
""",
          """    norm = math.sqrt(sum_loss(squared_norm(grads, chain, mesh), mesh))
    loss, grads = sum_loss(loss, mesh), reduce_gradients(grads, chain, mesh)
    watch.value("gradients", grads)
""", EQUAL, ALONE, MASTER),
)

# Collectives, their conjugates, the mesh, the wire.
COMMUNICATION = (
    Fault("no-conjugate", "bigcode-project/Megatron-LM#37",
          "what all ranks hold is used by each in its own way, and its gradients are not summed on the way back",
          "refpar.comm.pairs:copy_to", "partial(all_reduce, axis=axis)", "keep", RING, LONE_RANK, "conjugate"),
    Fault("reduced-both-ways", "jax-ml/jax#3970",
          "the backward of a sum over ranks is taken to be a sum again, though all ranks hold the one gradient: it counts p times",
          "refpar.comm.pairs:reduce_from", "axis=axis), keep", "axis=axis), partial(all_reduce, axis=axis)", RING, LONE_RANK,
          "conjugate"),
    Fault("slice-of-the-gathered", "NVIDIA-NeMo/Automodel#1260",
          "each rank uses what was gathered in its own way, and on the way back keeps its slice of its own gradient, not of the sum",
          "refpar.comm.pairs:gather_from", "partial(reduce_scatter,", "partial(my_slice,", RING, LONE_RANK, "conjugate"),
    Fault("swapped-axis", "PrimeIntellect-ai/prime-rl#2359",
          "a sum runs over the group of another axis of the mesh",
          "refpar.comm.mesh:groups", "grid.transpose(outside + inside)", "grid.transpose(inside + outside)", Layout(dp=2, tp=2),
          Layout(tp=4), "mesh_is_a_grid"),
    Fault("wrong-neighbour", "sgl-project/sglang#29571",
          "the partner of a message is not the one that the formula means; two ranks are each other's neighbour either way",
          "refpar.comm.ring:reduce_scatter", "right, left = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size",
          "left, right = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size", EVEN_RING, PAIR, "collective_means"),
    Fault("reused-buffer", "NVIDIA/Megatron-LM#4047",
          "what arrives is written where the last message is still being sent from: a race, which ranks as threads report for sure",
          "refpar.comm.ring:reduce_scatter", "scratch[step % 2]", "scratch[0]", RING, PAIR, "collective_means"),
    Fault("send-before-receive", "pytorch/pytorch#172668",
          "all neighbours send first, and receive when that is done: it works while messages are short enough to leave alone",
          "refpar.comm.ring:reduce_scatter",
          """        coming = axis.irecv(arriving, left)
        going = axis.isend(travelling, right)
        coming.wait()
        going.wait()
""", """        axis.send(travelling, right)
        axis.recv(arriving, left)
""", LONG_RING, EVEN_RING, "collective_means"),
    Fault("local-shapes", "deepspeedai/DeepSpeed#6809",
          "each rank takes its own counts for those of what the others will send (there the capacity of an expert)",
          "refpar.comm.collectives:all_to_all", "shape[join] = size", "shape[join] = join_sizes[axis.index]", RING, EVEN_RING,
          "collective_means"),
    Fault("rounded-at-each-hop", "NVIDIA/Megatron-LM#6199",
          "a ring of few bits rounds the sum on every rank that it passes, and is the worse the more there are",
          "refpar.comm.rounding:travels_as", "np.float64 if np.dtype(dtype) == np.float16 else dtype", "dtype",
          CommSituation(Layout(tp=4), shape=(4, 40), sizes=(1,) * 4, other_sizes=(10,) * 4), PAIR, "one_rounding"),
    Fault("one-long-message", "mpi4py/mpi4py#650",
          "a message is counted in 32 bits, which end at 2**31 - 1 bytes",
          "refpar.comm.wire:pieces", "range(0, max(nbytes, 1), limit)", "[0]", 2**31, 1000, "pieces_cover"),
)

# Who sees whom.
MASKS = (
    Fault("no-document-mask", "huggingface/nanoVLM#204",
          "packed documents restart their positions, and attention still looks from one into the other, forward and backward alike",
          "refpar.nn.attention:visible", "queries.document[:, :, None] == keys.document[:, None, :]",
          "0 * queries.document[:, :, None] == 0 * keys.document[:, None, :]",
          run(dp=1, rows=2, documents=(5, 16)), run(dp=1, rows=2), "document_isolation"),
)

FAULTS: tuple[Fault, ...] = (NORMALISATION + CLIPPING + COMMUNICATION + MASKS + STATE_SPACE + TENSOR_PARALLEL + CONTEXT_PARALLEL
                             + STATE_OVER_RANKS + PIPELINES + SCHEDULED + RESHARDING)


def fault_named(name: str) -> Fault:
    """The fault of that name; ValueError with all names where there is none."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise ValueError(f"fault {name!r} is not in the catalogue, which has {', '.join(fault.name for fault in FAULTS)}")


def property_of(fault: Fault) -> Callable:
    """The property(world, situation) that kills it."""
    rooms = (properties, properties_comm, properties_nn, properties_loss, properties_cp, properties_pp, properties_reshard,
             properties_state)
    return next(getattr(room, fault.property) for room in rooms if hasattr(room, fault.property))
