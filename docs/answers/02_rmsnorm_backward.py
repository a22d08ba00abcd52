"""An answer to chapter 2: the backward pass of RMS norm.

Judge it: python lessons/02_backward_by_hand.py --mine docs/answers/02_rmsnorm_backward.py
"""


def rmsnorm_backward(dy, saved, w):
    """y = w n with n = x scale.  What comes down to n, less its part along n, times scale."""
    scale = saved["scale"]                                          # [..., 1]
    n = saved["x"] * scale                                          # [..., D]
    dn = dy * w
    dx = scale * (dn - n * (dn * n).mean(axis=-1, keepdims=True))
    tokens = tuple(range(dy.ndim - 1))                              # all dims but the last
    return dx, (dy * n).sum(axis=tokens)
