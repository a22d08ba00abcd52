"""An answer to chapter 2: the backward pass of a scan.

Judge it: python lessons/02_scans.py --mine docs/answers/02_recurrence_backward.py
"""
import numpy as np


def recurrence_backward(dh, a, h, before=0.0, dafter=0.0):
    """The gradient of h[t] is what its readers say, and a[t+1] times the gradient of h[t+1]: a recurrence from the end."""
    db = np.array(dh)
    for t in reversed(range(len(db))):
        db[t] += a[t + 1] * db[t + 1] if t + 1 < len(db) else dafter
    past = np.append(before, h)[:len(db)]                           # h[t-1]
    return db * past, db, a[0] * db[0] if len(db) else dafter
