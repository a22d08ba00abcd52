"""Lesson 05: sequence and vocabulary parallel.

What:  Two more cuts over the same ranks as tensor parallelism.  Outside the layers each rank keeps its share of the tokens; and the
       vocabulary is cut, so that logits are never gathered: three numbers a token are enough for the loss.
Why:   Tensor parallelism alone leaves norms, dropout and the residual stream whole on every rank, and logits are the largest array of
       all.  Sequence parallelism cuts them for no more bytes than before; and then what is summed, and over whom, changes.

Run:   python lessons/05_sequence_and_vocabulary.py                              ranks are threads of one process
       mpiexec -n 4 python -m mpi4py lessons/05_sequence_and_vocabulary.py       ranks are processes (without `-m mpi4py` as safe)
       ... --show              step through the messages of the loss
       ... --fault NAME        plant a real mistake, such as largest-logit-of-a-rank: the lesson ends red
       ... --mine FILE         judge your own merge_over(spread, axis): spread is what a rank's words give, a Spread of refpar.nn.loss
                               (top, total, expected; [T] each); return that of all ranks' words, on every rank
"""
from dataclasses import replace

import numpy as np

from refpar import lesson
from refpar.comm.mesh import Mesh
from refpar.config import PRESETS, Layout, Model
from refpar.nn import loss
from refpar.oracle import equal, faults_tp, properties
from refpar.oracle.judge import weigh
from refpar.oracle.run import run_sharded
from refpar.oracle.situation import PROOF, Situation
from refpar.parallel import vocabulary
from refpar.plan import promise

WORDS = Model(vocab=10, padded_vocab=12, width=4, smoothing=0.1, z_loss=0.01)
LOGITS = np.random.default_rng(0).standard_normal((1, 3, 12)) * 4       # 3 tokens; two words are pads
TARGETS = np.array([[7, -1, 2]])                                        # the second does not count


def one_loss(wire):
    """The loss of the tokens, from this rank's words."""
    tp = Mesh(Layout(tp=wire.size), wire).axis("tp")
    mine = WORDS.part("V", tp.size, tp.index)
    forward, backward = vocabulary.cross_entropy(WORDS, tp)
    logits = np.ascontiguousarray(LOGITS[..., mine])
    spread = loss.partial(loss.real(logits[0], mine.start, WORDS.vocab), TARGETS[0], mine.start)
    (total, count), saved = forward(logits, TARGETS)
    return {"words": mine, "top": spread.top, "loss": float(total), "count": count, "dlogits": backward(1.0, saved)}


def teach(page: lesson.Page):
    p = page.ranks
    page.say(f"1. A vocabulary of {WORDS.vocab} words, padded to 12, on {lesson.count(p, 'rank')}.  The largest logit of each of 3 tokens:")
    told = page.run(one_loss)
    for rank, (one, _) in enumerate(told):
        tops = "  ".join(f"{top:>#9.4g}" for top in one["top"])
        page.say(f"  rank {rank}   words {one['words'].start:>2} to {one['words'].stop:>2}   {tops}")
    page.say("  A pad is no word: where a rank has pads alone, its largest is -inf, and its sum is 0.")

    page.say("", "2. One all_reduce finds the largest of all, one more adds two sums below it: 3 numbers a token, for any vocabulary.")
    whole, saved = loss.cross_entropy_forward(LOGITS, TARGETS, 0, loss.target_of(10, 0.1), 0.01, 10)
    gradient = loss.cross_entropy_backward(1.0, saved, 0, loss.target_of(10, 0.1), 0.01, 10)
    page.check(all(equal.distance(one["loss"], float(whole[0]), 30) <= 1 for one, _ in told),
               f"every rank has the loss of all words, {whole[0]:#.6g}, of {whole[1]} targets")
    page.check(all(equal.distance(one["dlogits"], gradient[..., one["words"]], 30) <= 1 for one, _ in told),
               "every rank has its words' part of the gradient; backward sends nothing")
    sums = [[promise.all_reduce_sends(rank, size, p, np.float64) for rank in range(p)] for size in (3, 6)]
    page.compare(told, [(a[0] + b[0], a[1] + b[1]) for a, b in zip(*sums)])
    page.show(told, lambda array: f"{array.size} numbers")

    page.say("", "3. Sequence parallelism: the same model with the stream whole on each rank, and cut by tokens.  All ranks, one step:")
    model, small = replace(PRESETS["llama-tiny"], blocks=1, dropout=0.1), replace(PROOF, steps=1)
    for sp in (False, True):
        situation = Situation(model, Layout(tp=p, sp=sp), small)
        runs = [one for one, _ in page.run(run_sharded, situation)]
        books = weigh(situation, runs).books
        share, _ = books.held["saved"]
        sent = books.sent.get("tp", (0, 0))
        page.say(f"  {'cut by tokens' if sp else 'whole':<14} kept for backward, at most {share:>6.1%} of the single process's; "
                 f"sent on tp {sent[0]:>9,} bytes = {sent[1]:,}")
    page.say("  An all_reduce is a reduce_scatter and an all_gather; here the one stands behind a layer and the other before the next.",
             "  The few bytes more are the norms' gradients, which are now addends too.")

    page.say("", "4. What stands outside the layers now meets other tokens on each rank: gradients of norms and output biases are addends.")
    short = replace(PROOF, rows=3, sequence=9)
    for name, changes, sp, what in (
            ("gpt2-uneven", {}, True, "a sequence that the ranks do not divide; norms, biases and positions outside"),
            ("llama-uneven", {"dropout": 0.3}, True, "dropout: each rank drops in its tokens what the whole would"),
            ("llama-uneven", {"dropout": 0.3}, False, "dropout: ranks with the whole stream drop alike"),
            ("llama-uneven", {"tied": True, "padded_vocab": 264, "smoothing": 0.2, "z_loss": 0.01}, True,
             "a tied table, cut and padded, smoothing and z-loss")):
        model = replace(PRESETS[name], blocks=1, **changes)
        page.prove(properties.sharded_equals_single, Situation(model, Layout(tp=p, sp=sp), short, 0, (5, 16), (0.0, 0.4)), what)
    if page.fault:
        page.say("", f"The fault was {page.fault.name}, reported as {page.fault.report}:", f"  {page.fault.summary}.")
    model = replace(PRESETS["llama-uneven"], blocks=1, padded_vocab=264, smoothing=0.2)
    page.judge("5.", [properties.sharded_equals_single], [Situation(model, Layout(tp=ranks), short, 0, (5, 16)) for ranks in (1, 2, 3, 4)])


if __name__ == "__main__":
    lesson.main(teach, mine=vocabulary.merge_over, gives=lambda spread, axis: loss.Spread(*spread),
                faults=faults_tp.VOCABULARY + faults_tp.DROPOUT + faults_tp.LAYERS[1:2])
