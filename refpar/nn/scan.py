"""The selective scan of Mamba-2: what it means.  The fast form is in `ssd.py`; token by token, the judge, in `oracle/naive.py`.

    h[t] = a[t] h[t-1] + dt[t] x[t] B[t]'       a state [P, N] for each head
    y[t] = h[t] C[t]

with a[t] = exp(dt[t] A), A = -exp(A_log) of the head, and a[t] = 0 where position[t] = 0: a document begins without a past.  A pad
has dt = 0, so the state passes it unchanged.
Heads share B and C in groups: head m is of group m*G//M.

What lies before the first token is the state `before` [B, M, P, N].  Law 5's three functions: a run of tokens is to the state what
its `Summary` says, `merge` puts one run behind another, and finishing is the pair of equations above.

Dao and Gu 2024 (Mamba-2), equation 1 with a scalar a; Gu and Dao 2023 (Mamba), for the discretisation.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Summary(NamedTuple):
    """A run of tokens as the state sees it: h -> decay h + state; decay [B, M], state [B, M, P, N]."""
    decay: np.ndarray
    state: np.ndarray


def merge(first: Summary, second: Summary) -> Summary:
    """First one run, then the other.  Associative.  Gradients of the state use it too, with the later tokens first."""
    return Summary(first.decay * second.decay, second.decay[..., None, None] * first.state + second.state)


def summary_of_state(state) -> Summary:
    """A state that is given.  Of zeros it is the identity of the merge: the empty run."""
    return Summary(np.ones(state.shape[:2], state.dtype), state)


def group_of(heads: int, groups: int) -> np.ndarray:
    """The group of each head, [M]."""
    return np.arange(heads) * groups // heads
