"""Real faults of tensor and sequence parallelism, and of the vocabulary-parallel loss, as data (see `faults.py`).

Each is killed by the master property: it compares with a single process, whose layers have no such line.
"""
from __future__ import annotations

from dataclasses import replace

from refpar.config import PRESETS, Layout, Model
from refpar.oracle.plant import Fault
from refpar.oracle.situation import PROOF, Situation
from refpar.oracle.situation_loss import LossSituation

LLAMA, GPT2, MAMBA2 = (replace(PRESETS[f"{name}-uneven"], blocks=1) for name in ("llama", "gpt2", "mamba2"))
FEW_KEYS = replace(LLAMA, kv_heads=2)


def run(model: Model = LLAMA, **layout) -> Situation:
    """A short run on at most 4 ranks."""
    return Situation(model, Layout(**layout), replace(PROOF, rows=3, sequence=9), 0, (5, 16), (0.0, 0.4))


MASTER, PAIRS, TENSOR = "sharded_equals_single", "refpar.comm.pairs", "refpar.parallel.tensor"
PLACEMENT, LOSS, FILL = "refpar.parallel.placement", "refpar.parallel.vocabulary", "refpar.parallel.fill"

LAYERS = (
    Fault("bias-on-every-rank", "Wenyueh/MinivLLM#80",
          "the bias of a row-parallel map is added inside the sum over ranks: as many times as there are ranks",
          "refpar.nn.residual:residual",
          """        y = seams.leave.forward(y, batch)                                           # [B, S, D]
        for bias in layer.outside:
            y = y + w[bias]
""", """        for bias in layer.outside:
            y = y + w[bias]
        y = seams.leave.forward(y, batch)
""", run(GPT2, tp=2), run(GPT2, dp=2), MASTER),
    Fault("sums-of-slices-forgotten", "awslabs/slapo#23",
          "under sequence parallelism a norm or an output bias meets a slice of the tokens on each rank, and its gradient is not summed",
          f"{PLACEMENT}:summed_axes", "if inside or sequence_parallel else", "if inside else",
          run(GPT2, tp=2, sp=True), run(GPT2, tp=2), MASTER),
    Fault("gradient-reduced-twice", "pytorch/torchtitan#2106",
          "the gradient of a Partial value is taken for Partial too, and summed: it is Replicate, and all ranks have it already",
          f"{PAIRS}:reduce_from", "keep, Partial, Invariant", "partial(all_reduce, axis=axis), Partial, Invariant",
          run(tp=2), run(dp=2), MASTER),
    Fault("gradient-not-reduced", "apple/ml-cross-entropy#42",
          "ranks that each used the whole input for some of the words or heads keep their addend of its gradient: the all_reduce that "
          "people forget",
          f"{PAIRS}:copy_to", "Pair(keep, partial(all_reduce, axis=axis), Invariant, Replicate)", "Pair(keep, keep, Invariant, Replicate)",
          run(tp=2), run(dp=2), MASTER),
    Fault("last-norm-not-summed", "NVIDIA-NeMo/Speech#7184",
          "the last norm has no mark, or one of another name, and is not on the list of what sequence parallelism sums",
          f"{PLACEMENT}:gradient_sums", "inside, layout.sp)", 'inside, layout.sp and not layer.endswith(".norm"))',
          run(tp=2, sp=True), run(tp=2), MASTER),
    Fault("norm-of-heads-not-summed", "NVIDIA/Megatron-LM#7452",
          "a norm's weight is shared by all heads, and heads are cut over ranks: its gradient is summed under sequence parallelism alone",
          f"{PLACEMENT}:summed_axes", "if inside or sequence_parallel else", 'if inside and "/tp" in dims or sequence_parallel else',
          run(replace(LLAMA, qk_norm=True), tp=2), run(replace(LLAMA, qk_norm=True), tp=2, sp=True), MASTER),
    Fault("copies-of-keys-not-summed", "bigcode-project/Megatron-LM#37",
          "fewer key heads than ranks: each copy of a key head sees some of its queries, and the copies' gradients are not summed",
          f"{PLACEMENT}:shared_units", "return units[0] if units and units[0] < layout.tp else None", "return None",
          run(FEW_KEYS, tp=4), run(FEW_KEYS, tp=2), MASTER),
    Fault("key-heads-in-turn", "huggingface/transformers#48307",
          "fewer key heads than ranks: rank r is given head r modulo their number, and not that of its queries",
          "refpar.config:run_of", "next((unit, run) for unit, run in enumerate(runs) if rank in run)",
          "rank % len(runs), next(run for run in runs if rank in run)", run(FEW_KEYS, tp=4), run(replace(LLAMA, kv_heads=1), tp=4), MASTER),
    Fault("group-of-local-width", "state-spaces/mamba#951",
          "the norm's groups are as wide as the local channels over the global number of groups",
          f"{TENSOR}:norm_groups", "config.norm_width, [config.part", "max(1, config.norm_width // tp.size), [config.part",
          run(replace(MAMBA2, ssm_heads=8, ssm_head_width=6, groups=2), tp=2), run(replace(MAMBA2), dp=2), MASTER),
    Fault("group-of-one-rank", "vllm-project/vllm#39262",
          "a group of the norm lies on several ranks, and each takes the statistic of its own channels",
          f"{TENSOR}:norm_groups", "pair = over(tp.among(ranks))", "pair = over(tp.among([tp.index]))",
          run(replace(MAMBA2, groups=1), tp=2), run(MAMBA2, tp=3), MASTER),
    Fault("group-of-all-ranks-one-way", "vllm-project/vllm#39262",
          "a group of the norm lies on several ranks, which add up the statistic forward, and not its gradient backward",
          f"{TENSOR}:norm_groups", "among(pair.backward)", "lambda part: part",
          run(replace(MAMBA2, groups=1), tp=2), run(MAMBA2, tp=3), MASTER),
)

VOCABULARY = (
    Fault("smoothing-of-local-words", "NVIDIA/Megatron-LM#737",
          "label smoothing spreads its share over the words of each rank, and not over all",
          f"{LOSS}:cross_entropy", "loss.target_of(config.vocab, config.smoothing)",
          'loss.target_of(max(1, config.part("V", tp.size, tp.index).stop - first), config.smoothing)',
          run(replace(LLAMA, smoothing=0.2), tp=2), run(LLAMA, tp=2), MASTER),
    Fault("words-counted-again", "NVIDIA/Megatron-LM#7452",
          "every rank's logits are taken for a part of the vocabulary where each has all of it: the loss grows by log(ranks)",
          f"{LOSS}:merge_over", "both = all_reduce(np.stack([mine.total, mine.expected]), axis)",
          "both = all_reduce(np.stack([mine.total * axis.size, mine.expected]), axis)", run(tp=2), run(dp=2), MASTER),
    Fault("largest-logit-of-a-rank", "NVIDIA/Megatron-LM#5522",
          "sums of exponentials are taken below each rank's own largest logit, and added as if it were one",
          f"{LOSS}:merge_over", "top = all_reduce(spread.top, axis, op=np.maximum)", "top = spread.top", run(tp=2), run(dp=2), MASTER),
    Fault("log-of-the-underflown", "NVIDIA/Megatron-LM#5522",
          "the log is taken of the probability: what is far below the largest logit has none, and an infinite loss",
          "refpar.nn.loss:finish", "losses, counted = lse - spread.expected + z",
          "losses, counted = -np.log(np.exp(spread.expected - spread.top) / spread.total) + z",
          LossSituation(spread=1000.0), LossSituation(), "vocabulary_loss"),
    Fault("pads-in-the-softmax", "pytorch/torchtitan#4319",
          "the vocabulary is padded to a rounder size, and the pads stand in the denominator",
          f"{LOSS}:cross_entropy", "loss.real(flat(logits), first, config.vocab)", "flat(logits)",
          run(replace(LLAMA, padded_vocab=264), tp=2), run(LLAMA, tp=2), MASTER),
)

DROPOUT = (
    Fault("one-mask-for-all-slices", "NVIDIA/Megatron-LM#1256",
          "under sequence parallelism each rank drops in its slice of the tokens what the first drops in its own",
          f"{TENSOR}:share_of_tokens",
          "return batch._replace(whole=None).cut(columns=share(batch.tokens.shape[1], tp.size, tp.index))",
          "part = batch._replace(whole=None).cut(columns=share(batch.tokens.shape[1], tp.size, tp.index))\n"
          "        return part._replace(index=batch.index[:, :part.index.shape[1]])",
          run(replace(LLAMA, dropout=0.3), tp=2, sp=True), run(replace(LLAMA, dropout=0.3), tp=2), MASTER),
    Fault("masks-drift-apart", "NVIDIA/Megatron-LM#206",
          "ranks that all hold the whole stream draw different masks for it",
          f"{FILL}:sharded", "Seams(*ends, dropout(config.dropout, seed, ",
          "Seams(*ends, dropout(config.dropout, seed + tp.index, ",
          run(replace(LLAMA, dropout=0.3), tp=2), run(LLAMA, tp=2), MASTER),
)

TENSOR_PARALLEL = LAYERS + VOCABULARY + DROPOUT
