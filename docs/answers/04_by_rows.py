"""An answer to chapter 4: a linear map whose matrix is cut by rows.

Judge it: python lessons/04_tensor_parallel.py --mine docs/answers/04_by_rows.py
"""
from refpar.comm.collectives import all_reduce
from refpar.config import share


def by_rows(x, w, axis):
    """Rows of w meet columns of x: a rank that has some of both makes an addend of every number of y.  Without any, it adds zeros."""
    mine = share(len(w), axis.size, axis.index)
    return all_reduce(x[:, mine] @ w[mine], axis)
