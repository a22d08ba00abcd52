"""Derivatives judged by finite differences, as an inner product.

A backward pass says <dy, f(x + h v) - f(x - h v)> / 2h = <dx, v> for every direction v.  One drawn direction for each input finds
any wrong element of its gradient, but for a chance of measure zero.
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


def replaced(tree, path, array):
    """The nest with one leaf replaced."""
    return tree | {path[0]: replaced(tree[path[0]], path[1:], array)} if path else array


def drawn_like(tree, rng):
    """A nest of standard normal numbers of the same shapes and dtypes; None stays None."""
    if isinstance(tree, dict):
        return {name: drawn_like(branch, rng) for name, branch in tree.items()}
    return None if tree is None else rng.standard_normal(tree.shape).astype(tree.dtype)


def inner(a, b) -> tuple[float, float]:
    """<a, b> over two nests of the same names, and the root of the sum of the squares of its addends."""
    products = np.concatenate([np.zeros(0), *((x * y).ravel() for (_, x), (_, y) in zip(paths(a), paths(b), strict=True))])
    return float(products.sum()), float(np.sqrt(np.square(products).sum()))


def slope(function, inputs, path, direction, doutputs, h: float) -> float:
    """The central difference of <doutputs, function> along a direction of one input."""
    x = dict(paths(inputs))[path]
    up, down = (inner(doutputs, function(replaced(inputs, path, x + step * direction)))[0] for step in (h, -h))
    return (up - down) / (2 * h)


def assert_derivative(function, inputs: dict, grads: dict, doutputs, rng):
    """function(inputs) -> outputs, nests of float64 arrays; grads: what backward gave for `doutputs`, named like inputs."""
    grads, size = dict(paths(grads)), inner(doutputs, function(inputs))[1]
    assert grads.keys() == dict(paths(inputs)).keys()
    for path, x in paths(inputs):
        grad, name, direction = grads[path], ".".join(path), rng.standard_normal(x.shape)
        assert grad.shape == x.shape and grad.dtype == x.dtype, f"the gradient of {name} is {grad.dtype} {grad.shape}"
        coarse, fine = (slope(function, inputs, path, direction, doutputs, h) for h in (STEP, STEP / 2))
        measured = (4 * fine - coarse) / 3
        told, addends = inner(grad, direction)
        assert abs(measured - told) <= ALLOWED * (size + addends), f"{name}: <grad, v> is {told:.9g}, differences {measured:.9g}"
