"""An answer to chapter 7: two runs of tokens as one.

Judge it: python lessons/07_mamba_parallel.py --mine docs/answers/07_merge.py
"""
from refpar.nn.scan import Summary


def merge(first, second):
    """h -> decay2 (decay1 h + state1) + state2."""
    return Summary(first.decay * second.decay, second.decay[..., None, None] * first.state + second.state)
