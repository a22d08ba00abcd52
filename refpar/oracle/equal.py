"""Equal: the one comparison of this project, for tests, `verify` and the oracle alike.

A value that is a sum of n addends, added in another order, differs by rounding.  Each addition rounds by at most eps/2 of what
it yields, and n roundings of drawn sign add up like sqrt(n), not like n.  So two values count as equal when

    |a - b| <= 32 eps sqrt(n) scale

    n      the longest sum behind the value: tokens for a weight's gradient, the width contracted for an activation; where sums
           follow one another (the layers of a model), the longest of them
    scale  the largest magnitude of the tensor, or, where its addends cancel, of the addends: then the caller passes it
    eps    the spacing of the dtype at 1, of the coarser one where two dtypes meet
    32     one factor for everything; no call has its own

NaN is unequal to all, itself too; an infinity equals only itself; whole numbers and truths are equal or not at all.
Below the smallest normal number the spacing no longer shrinks, so scale counts as at least that.
"""
from __future__ import annotations

import numpy as np

FACTOR = 32


def bound(dtype, n: int, scale: float) -> float:
    """32 eps sqrt(n) scale: how far two equal values of `dtype` may lie apart; 0 for whole numbers and truths."""
    if n < 1:
        raise ValueError(f"equal: n={n} must be at least 1, for it counts the addends of the longest sum behind a value")
    if not np.issubdtype(dtype, np.floating):
        return 0.0
    about = np.finfo(dtype)
    return FACTOR * float(about.eps) * float(np.sqrt(n)) * max(float(scale), float(about.smallest_normal))


def distance(a, b, n: int, scale: float | None = None) -> float:
    """How far a and b lie apart, in units of the bound: at most 1 is equal, inf is NaN beside anything.

    a, b of the same shape; their dtypes may differ here, and the coarser one's eps counts.  Empty arrays: 0.
    """
    return float(np.max(_distances("equal", a, b, n, scale), initial=0.0))


def assert_equal(a, b, n: int, scale: float | None = None, name: str = "value"):
    """AssertionError, one sentence with the first wrong index and its numbers, unless a equals b in shape, dtype and value."""
    _assert_alike(a, b, name)
    apart = _distances(name, a, b, n, scale)
    wrong = np.argwhere(~(apart <= 1))
    if len(wrong):
        first = tuple(int(i) for i in wrong[0])
        place = f"[{', '.join(map(str, first))}]" if first else ""
        raise AssertionError(
            f"{name}{place} is {np.asarray(a)[first]!s} and must be {np.asarray(b)[first]!s}: {apart[first]:.3g} times the bound "
            f"away, with n={n} and scale {_scale(a, b, scale):.3g} ({len(wrong)} of {apart.size} elements are wrong)")


def compare(tree_a, tree_b, n: int) -> dict[str, float]:
    """Nested dicts of arrays -> {name: distance} in the order of tree_a, names joined by dots, as in `3.attention.q`.

    Both trees must have the same names, shapes and dtypes, else AssertionError; None beside None is passed over.
    """
    left, right = dict(leaves(tree_a)), dict(leaves(tree_b))
    lone = [name for name in left | right if (name in left) != (name in right)]
    if lone:
        raise AssertionError(f"{lone[0]} is in one of the two trees only, as are {len(lone) - 1} other names")
    for name in left:
        _assert_alike(left[name], right[name], name)
    return {name: distance(left[name], right[name], n) for name in left if left[name] is not None}


def leaves(tree, name: str = ""):
    """(dotted name, leaf) of a nest of dicts, in order."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from leaves(branch, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree


def _distances(name, a, b, n, scale):
    """The distance of each element, in units of the bound, in float64."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise AssertionError(f"{name} has shape {list(a.shape)} and must have {list(b.shape)}")
    limit = bound(_coarser(a, b), n, _scale(a, b, scale))
    wide_a, wide_b = (x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x for x in (a, b))
    with np.errstate(all="ignore"):                                         # inf - inf and 0/0 are settled by the `where`
        apart = np.abs(wide_a.astype(np.float64) - wide_b.astype(np.float64)) / limit
    apart = np.where(np.isnan(apart) | (limit == 0), np.inf, apart)
    return np.where(wide_a == wide_b, 0.0, apart)


def _coarser(a, b):
    """The dtype with the larger eps; a whole number beside a floating one takes that one's."""
    floating = [x.dtype for x in (a, b) if np.issubdtype(x.dtype, np.floating)]
    return max(floating, key=lambda dtype: np.finfo(dtype).eps, default=a.dtype)


def _scale(a, b, scale):
    """The scale given, or the largest finite magnitude of both tensors."""
    if scale is not None:
        return float(scale)
    return max(float(np.max(np.abs(x, dtype=np.float64), where=np.isfinite(x), initial=0.0)) for x in map(np.asarray, (a, b)))


def _assert_alike(a, b, name):
    """Shapes and dtypes must match; a number of Python has no dtype of its own."""
    if (a is None) != (b is None):
        raise AssertionError(f"{name} is {'None' if a is None else 'an array'} and must be {'None' if b is None else 'an array'}")
    if np.shape(a) != np.shape(b):
        raise AssertionError(f"{name} has shape {list(np.shape(a))} and must have {list(np.shape(b))}")
    if hasattr(a, "dtype") and hasattr(b, "dtype") and a.dtype != b.dtype:
        raise AssertionError(f"{name} is {a.dtype} and must be {b.dtype}")
