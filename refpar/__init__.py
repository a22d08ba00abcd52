"""refpar: the reference implementation of large-language-model parallelism.

Rooms, from the lowest: `watch` (observers), `config` and `corpus` (sizes, text), `nn` (arithmetic of one process, knows no rank),
`comm` (wires, collectives, mesh; knows no layer), `parallel` (where both meet), `train` and `checkpoint`, `oracle` (the proof).

Words
-----
rank        one process or thread of the world
world       all ranks that were started
mesh        the grid of ranks; its axes are dp, pp, cp, tp
dim         a dimension of an array (an axis is always the mesh's)
placement   where a value lies on an axis: Shard(dim), Partial (a sum not yet reduced), Replicate (whole on each rank, and each
            does something of its own with it), Invariant (whole on each rank, and each does the same)
layer       one entry of the chain: a mixer (attention, Mamba-1, Mamba-2) or an MLP on the residual stream, embedding, norm or head
block       the pattern of layers that a model repeats
seam        a place in a layer where data of another rank may be needed; its filling is a pair, forward and backward
saved       what forward keeps for backward
stage       a run of the chain's layers that one rank of pp holds; a rank may hold several
slot        what a rank runs as one in a schedule: an op (F, B, W or BW of a stage and micro-batch), or a pair of them
settle      multiply out the weight gradients that backward left as products

Letters (the survey's and the papers' in brackets)
--------------------------------------------------
B  rows of a batch (b)                      S  tokens of a row (s)              T  tokens, B*S
D  width of the residual stream (d)         V  vocabulary (v)                   F  width of the MLP (I)
H  query heads (a)                          K  key/value heads (k)              E  width of a head (d_h)
M  heads of Mamba (h)                       P  width of a Mamba head (p)        N  state of a Mamba head (n)
G  groups of Mamba heads that share B, C    W  taps of the conv (w)             L  chunk of the scan (l)
X  learned positions
I  width inside Mamba-1 (d_inner)           R  rank of its time step (dt_rank)

Shapes stand behind the lines that change them: `# [B, S, F/tp]` is this rank's shard of F, a letter without a slash is whole,
`+tp` marks a Partial value.  Letters written together, `HE`, are a product, cut in whole first letters.
"""
import os

__version__ = "0.1.0"

# A rank is one core: ranks whose matrix products each run on all cores slow each other down a hundred times.  numpy's library
# reads this when it is first imported; what the user has set stays.
for _threads in ("OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_threads, "1")

