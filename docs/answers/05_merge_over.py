"""An answer to chapter 5: the loss's partial results of all ranks, as one.

Judge it: python lessons/05_sequence_and_vocabulary.py --mine docs/answers/05_merge_over.py
"""
import numpy as np

from refpar.comm.collectives import all_reduce
from refpar.nn.loss import Spread


def merge_over(spread, axis):
    """The largest of all first; each rank then moves its sum below it; a rank without words has the largest -inf, and the sum 0."""
    top = all_reduce(spread.top, axis, op=np.maximum)
    total = spread.total * np.exp(spread.top - top)
    both = all_reduce(np.stack([total, spread.expected]), axis)
    return Spread(top, both[0], both[1])
