"""Faults of attention cut over context-parallel ranks: what merges, what is masked, whose tokens stand where.

As in `faults.py`.  What they have in common: lengths that divide, one document, quiet scores and a single rank hide them.
"""
from __future__ import annotations

from dataclasses import replace

from refpar.oracle.faults_tp import MASTER, run
from refpar.oracle.plant import Fault
from refpar.oracle.situation_cp import ContextSituation as Situation

RING = Situation(ranks=3, tokens=9, documents=(5, 9))
ALONE = Situation(ranks=1, tokens=9, documents=(5, 9))
MOVED_Q = Situation(ranks=3, tokens=9, moved="q")                   # two blocks without visible keys meet on the way home
LOUD = Situation(ranks=3, tokens=9, loud=1000.0)
WINDOW = Situation(ranks=2, window=2)
ZIGZAG = Situation(ranks=2, way="zigzag")
HEADS = Situation(ranks=2, way="ulysses", heads=6, kv_heads=3)
SPLIT = Situation(ranks=4, way="ulysses+ring", heads=4, kv_heads=2)
SHARED = Situation(ranks=4, way="ulysses", heads=4, kv_heads=2)

CONTEXT, ULYSSES, MERGE = "refpar.parallel.context", "refpar.parallel.ulysses", "refpar.nn.blocks:merge"
HOLDS = "context_attention"

# What is merged.
MERGED = (
    Fault("merge-overflows", "jzhang38/EasyContext#14",
          "the lse of two blocks is merged as a + log(1 + exp(b - a)), which is infinite where b is much the larger",
          MERGE, "np.logaddexp(a.lse, b.lse)",
          "np.where(np.isneginf(a.lse), b.lse, a.lse + np.log1p(np.exp(b.lse - np.where(np.isneginf(a.lse), 0, a.lse))))",
          LOUD, RING, HOLDS),
    Fault("sentinel-for-nothing", "flashinfer-ai/flashinfer#4401",
          "a block without a visible key has a large negative number for the lse of nothing, and real scores are lower",
          "refpar.nn.blocks:identity", "-np.inf", "-50.0", LOUD, RING, HOLDS),
    Fault("nothing-minus-nothing", "flashinfer-ai/flashinfer#4401",
          "two blocks that both see nothing are merged with -inf - (-inf), which is no number",
          MERGE, "shift = finite(lse)", "shift = lse", MOVED_Q, RING, HOLDS),
    Fault("local-lse", "meta-pytorch/attention-gym#200",
          "the backward of a ring gets the lse of the rank's own block, where that of the merged result belongs",
          f"{CONTEXT}:ring_among", "return Attended(finish(attended), attended.lse)",
          "return Attended(finish(attended), here.partial(q, k, v, places(batch), places(batch), batch.step).lse)",
          RING, ALONE, HOLDS),
    Fault("delta-of-the-own-block", "meta-pytorch/attention-gym#200",
          "the backward of a ring takes delta, the sum of dout * out, of the rank's own block, where that of the merged result belongs",
          f"{CONTEXT}:ring_among", "dq = np.zeros_like(q)",
          "delta = np.vecdot(dout, finish(here.partial(q, k, v, places(batch), places(batch), batch.step)))\n        dq = np.zeros_like(q)",
          RING, ALONE, HOLDS),
    Fault("lse-to-the-base-2", "meta-pytorch/attention-gym#200",
          "the lse reaches the backward in other units than it expects, those of a logarithm to the base 2",
          f"{CONTEXT}:attend_forward", '"lse": lse}', '"lse": lse * 0.6931471805599453}', RING,
          Situation(ranks=3, tokens=1, loud=0.0), HOLDS),
    Fault("rounded-at-each-hop-of-a-ring", "zhuzilin/ring-flash-attention#42",
          "what the ring has so far is rounded to 16 bits before each merge: the error grows with the ranks",
          f"{CONTEXT}:ring_among", "attended = merge(attended, here.partial(",
          "attended = merge(Attended(*(x.astype(np.float16).astype(q.dtype) for x in attended)), here.partial(",
          RING, ALONE, HOLDS),
)

# Who sees whom, and where the tokens are.
PLACED = (
    Fault("window-lost-on-the-way", "huggingface/accelerate#4177",
          "a ring knows causal masks only, and drops the window of a layer that slides",
          f"{CONTEXT}:Here.partial", "self.window", "EVERYTHING", WINDOW, RING, HOLDS),
    Fault("documents-lost-on-the-way", "huggingface/trl#6843",
          "a ring knows causal masks only, and each packed document sees those before it",
          f"{CONTEXT}:Here.partial", "return blocks.partial(q",
          "queries, keys = (at._replace(document=0 * at.document, position=at.index) for at in (queries, keys))\n"
          "        return blocks.partial(q", RING, Situation(ranks=2), HOLDS),
    Fault("another-order", "ISEEKYAN/Megatron-LM#208",
          "tokens are dealt out in one order, and positions believe in another",
          f"{CONTEXT}:standing", "together(whole, way, ranks,", 'together(whole, "contiguous", ranks,',
          ZIGZAG, Situation(ranks=2), HOLDS),
    Fault("gathered-in-rank-order", "NVIDIA/TransformerEngine#1557",
          "shards of a zig-zag are put one behind the other as if they were runs of the row",
          "refpar.parallel.order:zigzag", "for run in (rank, 2 * ranks - 1 - rank)", "for run in (2 * rank, 2 * rank + 1)",
          ZIGZAG, None, HOLDS),
    Fault("remainder-dropped", "NVIDIA/TransformerEngine#1930",
          "a row's length is divided by the ranks and rounded down: the last tokens are nobody's",
          "refpar.parallel.order:contiguous", "share(length, ranks, rank)", "share(length // ranks * ranks, ranks, rank)",
          Situation(ranks=2, tokens=9), Situation(ranks=2), HOLDS),
)

# Heads.
HEADED = (
    Fault("key-heads-cut-alone", "vllm-project/vllm-omni#5716",
          "query heads and key heads are each cut as evenly as can be, and a query meets the key head of another group",
          f"{ULYSSES}:head_parts", "(slice(part.start * group, part.stop * group), part)",
          "(share(heads, ranks, own.index(part)), part)",
          HEADS, Situation(ranks=2, way="ulysses"), HOLDS),
    Fault("copies-not-added", "vllm-project/vllm-omni#5716",
          "key heads are copied to the ranks that share them, and the gradient of one of the copies is taken for all",
          f"{ULYSSES}:to_tokens", "x[:, :, part] += addend", "x[:, :, part] = addend", SHARED,
          Situation(ranks=2, way="ulysses"), HOLDS),
    Fault("dropout-of-the-first-heads", "NVIDIA/Megatron-LM#1256",
          "every rank drops as if its heads were the first",
          f"{ULYSSES}:ulysses", "dropped(parts[near.index][0].start)", "dropped(0)",
          Situation(ranks=2, way="ulysses", dropout=0.3), Situation(ranks=2, way="ulysses"), HOLDS),
    Fault("remembered-cut", "deepspeedai/DeepSpeed#8291",
          "the cut of the heads is remembered from another call, here one with another number of ranks: some heads are nobody's",
          f"{ULYSSES}:ulysses", "parts, heads = head_parts(q.shape[2], k.shape[2], size), q.shape[2]",
          "parts, heads = head_parts(q.shape[2], k.shape[2], cp.size)[:size], q.shape[2]",
          SPLIT, Situation(ranks=2, way="ulysses"), HOLDS),
)

# What is on its way, and what is divided by what.
SUMMED = (
    Fault("received-into-what-leaves", "NVIDIA/Megatron-LM#4047",
          "the next rank's keys arrive in the buffer from which this rank's are still being sent, and read",
          "refpar.parallel.travel:travel", "received.append(np.empty(shapes[(owner - 1) % axis.size], x.dtype))",
          "coming = shapes[(owner - 1) % axis.size]\n"
          "            received.append(x if hop and x.shape == coming else np.empty(coming, x.dtype))",
          RING, Situation(ranks=2), HOLDS),
    Fault("targets-shifted-on-each-rank", "huggingface/transformers#36607",
          "targets are made by shifting the tokens that a rank has: the last of each shard has none, or that of another place",
          "refpar.parallel.order:together", "_replace(whole=whole)",
          "_replace(whole=whole, targets=np.where(whole.targets[:, held] < 0, -1, np.pad(whole.tokens[:, held], ((0, 0), (0, 1)), "
          "constant_values=-1)[:, 1:]))", run(cp=2), replace(run(dp=2), documents=(9,)), MASTER),
    Fault("count-of-each-shard", "NVIDIA/Megatron-LM#7513",
          "each cp rank divides by the targets of its own shard, and the means are averaged over cp",
          "refpar.parallel.data:count_targets", 'mesh.axis("dp", "cp"))[0])', 'mesh.axis("dp"))[0]) * mesh.axis("cp").size',
          run(cp=2), run(dp=2), MASTER),
    Fault("loss-times-cp", "NVIDIA/Megatron-LM#906",
          "the loss is multiplied by cp, for gradients that would be averaged over dp and cp, and are not over cp",
          "refpar.train:train_step", "state.params, batches, count)", 'state.params, batches, count / mesh.axis("cp").size)',
          run(cp=2), run(dp=2), MASTER),
    Fault("averaged-over-shards", "deepspeedai/DeepSpeed#5248",
          "gradients are averaged over all ranks, though those of cp have parts of one sequence",
          "refpar.parallel.data:reduce_gradients", "flat = all_reduce(flat, bucket.over.on(mesh))",
          'flat = all_reduce(flat, bucket.over.on(mesh)) / mesh.axis("cp").size', run(cp=2), run(dp=2), MASTER),
)

CONTEXT_PARALLEL: tuple[Fault, ...] = MERGED + PLACED + HEADED + SUMMED
