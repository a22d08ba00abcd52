"""An answer to chapter 0: broadcast down a binomial tree.

Judge it: python lessons/00_ranks_and_messages.py --mine docs/answers/00_broadcast.py
"""
import numpy as np


def broadcast(x, axis, root=0):
    """In round k those at distance 0 to 2**k - 1 from the root have the value, and each tells the one 2**k further."""
    place = (axis.index - root) % axis.size
    value = np.array(x) if place == 0 else np.empty(x.shape, x.dtype)
    reach = 1
    while reach < axis.size:
        if place < reach and place + reach < axis.size:
            axis.send(value, (axis.index + reach) % axis.size)
        elif reach <= place < 2 * reach:
            axis.recv(value, (axis.index - reach) % axis.size)
        reach *= 2
    return value
