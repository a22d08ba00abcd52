"""An answer to chapter 12: over which axes a gradient is summed.

Judge it: python lessons/12_all_axes.py --mine docs/answers/12_summed_axes.py
"""


def summed_axes(dims, inside, sequence_parallel=False):
    """The axes that cut the activations which the parameter meets, less those that cut the parameter."""
    met = ["dp", "cp"]
    if inside or sequence_parallel:
        met.append("tp")
    return tuple(axis for axis in met if not any(word.endswith("/" + axis) for word in dims.split()))
