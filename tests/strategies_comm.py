"""Situations of communication, drawn: any mesh of up to 8 ranks, any axis of it or several, any shards."""
import math
from collections import defaultdict
from functools import cache
from itertools import combinations, product

from hypothesis import strategies as st

from refpar.config import AXES, Layout, shares
from refpar.oracle.cases_comm import CASES
from refpar.oracle.situation_comm import CommSituation

MOST = 8            # ranks
EXAMPLES = 40       # of a property: each runs a third of the collectives, on every group of the mesh
THIRDS = [tuple(name for name, case in CASES.items() if case.operation in operations) for operations in (
    ("all_reduce",), ("reduce_scatter", "all_gather", "all_to_all", "exchange"),
    ("reduce", "broadcast", "gather", "scatter", "send_along", "barrier"))]
_AXES = [axes for count in range(len(AXES) + 1) for axes in combinations(AXES, count)]  # from none to all


@cache
def layouts(most: int = MOST):
    """Meshes of at most `most` ranks, with any axis outermost; small ones first."""
    grids = sorted((sizes for sizes in product(range(1, most + 1), repeat=len(AXES)) if math.prod(sizes) <= most), key=math.prod)
    return st.builds(lambda sizes, order: Layout(*sizes, order=tuple(order)), st.sampled_from(grids), st.permutations(AXES))


@st.composite
def lengths(draw, ranks: int):
    """Lengths of shards, one for each rank: as even as can be, or anything, and often nothing."""
    if draw(st.booleans()):
        return tuple(shares(draw(st.sampled_from((ranks, 1, ranks + 1, 2 * ranks - 1, 0))), ranks))
    return tuple(draw(st.lists(st.sampled_from((1, 0, 2, 3)), min_size=ranks, max_size=ranks)))


@cache
def groups_of(most: int) -> dict[int, list]:
    """Ranks of a group -> every mesh of at most `most` ranks, and long axes of it, with such groups: (sizes, axes)."""
    found = defaultdict(list)
    for sizes in sorted(product(range(1, most + 1), repeat=len(AXES)), key=math.prod):
        for axes in _AXES if math.prod(sizes) <= most else ():
            lengths = [sizes[AXES.index(axis)] for axis in axes]
            if 1 not in lengths:
                found[math.prod(lengths)].append((sizes, axes))
    return dict(sorted(found.items()))


@cache
@st.composite
def situations(draw, most: int = MOST, dtypes=("float64", "int64", "float32", "float16")):
    """Whole situations; every field is drawn.  Groups of any size are as likely, for what they do depends on it."""
    ranks = draw(st.sampled_from(sorted(groups_of(most))))
    grid, long = draw(st.sampled_from(groups_of(most)[ranks]))
    axes = tuple(axis for axis, size in zip(AXES, grid) if axis in long or size < 2 and draw(st.booleans()))
    layout = Layout(*grid, order=tuple(draw(st.permutations(AXES))))
    sizes, other_sizes = draw(lengths(ranks)), draw(lengths(ranks))
    shape = draw(st.lists(st.sampled_from((1, 2, 3, 0)), min_size=2, max_size=3))
    dim, other = draw(st.permutations(range(len(shape))))[:2]
    shape[dim], shape[other] = sum(sizes), sum(other_sizes)
    return CommSituation(layout, axes, tuple(shape), dim, sizes, other, other_sizes, draw(st.sampled_from(dtypes)),
                         root=draw(st.integers(0, ranks - 1)), op=draw(st.sampled_from(("add", "maximum"))),
                         segment=draw(st.sampled_from((16, 8, 1 << 20))), node=draw(st.sampled_from((None, 1, 2, 3, 4))),
                         cases=draw(st.sampled_from(THIRDS)), strided=draw(st.booleans()), seed=draw(st.integers(0, 99)))
