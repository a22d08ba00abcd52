"""A backward pass judged by finite differences, through inner products.

For outputs f and inputs x, backward must return for a gradient d of the outputs that gradient g of the inputs which has

    <g, v> = the derivative of <d, f(x + h v)> by h at 0

for every direction v.  The derivative is a central difference with Richardson's correction, in float64.  One drawn direction finds
any wrong element of a gradient, but for a chance of measure zero.
"""
from __future__ import annotations

import numpy as np

STEP = 2e-4         # h: by Richardson's two steps the error is of the order of h**4, and rounding's 1e-16/h
ALLOWED = 1e-9      # of the addends of both inner products


def paths(tree, path=()):
    """(path, leaf) of a nest of dicts, in order; None is no leaf."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from paths(branch, (*path, key))
    elif tree is not None:
        yield path, tree


def branch(tree, path):
    """What stands at a path of a nest."""
    return branch(tree[path[0]], path[1:]) if path else tree


def replaced(tree, path, other):
    """The nest with what stands at one path replaced."""
    return tree | {path[0]: replaced(tree[path[0]], path[1:], other)} if path else other


def moved(tree, direction, by: float):
    """tree + by * direction, leaf by leaf."""
    if isinstance(tree, dict):
        return {name: moved(tree[name], direction[name], by) for name in tree}
    return None if tree is None else tree + by * direction


def drawn_like(tree, rng):
    """A nest of standard normal numbers of the same shapes and dtypes; None stays None."""
    if isinstance(tree, dict):
        return {name: drawn_like(part, rng) for name, part in tree.items()}
    return None if tree is None else rng.standard_normal(tree.shape).astype(tree.dtype)


def inner(a, b) -> tuple[float, float]:
    """<a, b> over two nests of the same names, and the root of the sum of the squares of its addends."""
    a, b = dict(paths(a)), dict(paths(b))
    assert a.keys() == b.keys()
    products = np.concatenate([np.zeros(0), *((x * b[path]).ravel() for path, x in a.items())])
    return float(products.sum()), float(np.sqrt(np.square(products).sum()))


def slope(function, inputs, path, direction, doutputs, h: float) -> float:
    """The central difference of <doutputs, function> along a direction of what stands at one path of the inputs."""
    x = branch(inputs, path)
    up, down = (inner(doutputs, function(replaced(inputs, path, moved(x, direction, step))))[0] for step in (h, -h))
    return (up - down) / (2 * h)


def assert_derivative(function, inputs: dict, grads: dict, doutputs, rng, depth: int | None = None):
    """function(inputs) -> outputs, nests of float64 arrays; grads: what backward gave for `doutputs`, named like inputs.

    One direction for each array, or, with `depth`, for all the arrays whose paths begin alike.
    """
    size, leaves = inner(doutputs, function(inputs))[1], dict(paths(inputs))
    assert dict(paths(grads)).keys() == leaves.keys()
    for path, grad in paths(grads):
        assert grad.shape == leaves[path].shape and grad.dtype == leaves[path].dtype, (
            f"the gradient of {'.'.join(path)} is {grad.dtype} {grad.shape}")
    for path in dict.fromkeys(path[:depth] for path in leaves):
        direction = drawn_like(branch(inputs, path), rng)
        coarse, fine = (slope(function, inputs, path, direction, doutputs, h) for h in (STEP, STEP / 2))
        measured = (4 * fine - coarse) / 3
        told, addends = inner(branch(grads, path), direction)
        assert abs(measured - told) <= ALLOWED * (size + addends), (
            f"{'.'.join(path)}: <grad, v> is {told:.9g}, differences say {measured:.9g}")
