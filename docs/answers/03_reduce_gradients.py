"""An answer to chapter 3: gradients, summed parameter by parameter.

Judge it: python lessons/03_data_parallel.py --mine docs/answers/03_reduce_gradients.py
"""
from refpar.comm.collectives import all_reduce


def reduce_gradients(grads, chain, mesh):
    """One all_reduce for each parameter: the bytes of one bucket, in many more messages."""
    axis = mesh.axis("dp", "cp")
    return {layer: {name: all_reduce(grad, axis) for name, grad in group.items()} for layer, group in grads.items()}
