"""An answer to chapter 1: ring all_reduce.

Judge it: python lessons/01_collectives_from_nothing.py --mine docs/answers/01_all_reduce.py
"""
import numpy as np


def all_reduce(x, axis):
    """The sum of every rank's x, on all ranks, of which each sends 2(p-1) messages."""
    p, i = axis.size, axis.index
    right, left = (i + 1) % p, (i - 1) % p
    flat = np.array(x).reshape(x.size)                                      # a copy, in one run of memory
    parts = [slice(x.size * j // p, x.size * (j + 1) // p) for j in range(p)]

    for step in range(p - 1):                                               # 1. sums travel, and grow
        leaving, growing = parts[(i - 1 - step) % p], parts[(i - 2 - step) % p]
        arriving = np.empty(growing.stop - growing.start, x.dtype)
        coming = axis.irecv(arriving, left)
        going = axis.isend(flat[leaving], right)
        coming.wait()
        going.wait()
        flat[growing] += arriving                                           # now rank i holds the finished part i

    for step in range(p - 1):                                               # 2. finished parts travel, as they are
        coming = axis.irecv(flat[parts[(i - 1 - step) % p]], left)
        going = axis.isend(flat[parts[(i - step) % p]], right)
        coming.wait()
        going.wait()
    return flat.reshape(x.shape)
