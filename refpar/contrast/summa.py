"""Two-dimensional tensor parallelism: y = x W with both matrices cut in both dims, by SUMMA; and 2.5 dimensions.

Ranks stand in a grid of q rows and q columns; rank (i, j) holds block (i, j) of x [T, J], of W [J, O] and of y [T, O].  In step k the
ranks of grid column k send their block of x along their rows, those of grid row k their block of W along their columns, and each rank
adds one product:

    y_ij = sum over k of x_ik W_kj          dx_ik = sum over j of dy_ij W_kj'          dW_kj = sum over i of x_ik' dy_ij

Backward is the same with the roles changed: what was sent to all is in the other sum reduced from all.  No rank ever holds a whole
row or column.  Sent by all ranks together, in elements, exactly (trees and reductions send a block q-1 times):

    forward     (q-1) (T J + J O)
    backward    dx: (q-1) (J O + T J)           dW: (q-1) (T J + J O)

A rank of p = q^2 sends about (T J + J O) / q forward: less and less as p grows, where one-dimensional tensor parallelism sends 2 T O
however many ranks there are.  But it sends weights too, so it pays where T is large beside J and O, and never for a few tokens.

With `depth` copies of the grid (2.5D) each copy does its share of the steps, and the copies add up: fewer steps, more memory.

Source: van de Geijn and Watts 1997, "SUMMA"; Xu et al. 2021, "An efficient 2D method for training super-large deep learning models";
Wang et al. 2021, "Tesseract", for the copies.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from refpar import watch
from refpar.comm.collectives import all_reduce, broadcast, reduce
from refpar.config import share, shares


class Grid(NamedTuple):
    """A rank's axes: `row` is the ranks of its grid row, `column` those of its grid column, `depth` those at its place of each copy."""
    row: object
    column: object
    depth: object

    def steps(self) -> range:
        """The steps that this copy does."""
        return range(self.row.size)[share(self.row.size, self.depth.size, self.depth.index)]


def block(whole, grid: Grid) -> np.ndarray:
    """This rank's block of a matrix."""
    rows, columns = whole.shape
    return whole[share(rows, grid.column.size, grid.column.index), share(columns, grid.row.size, grid.row.index)]


def forward(x, w, grid: Grid, inner: int):
    """Blocks x [T/q, J/q], w [J/q, O/q] -> y [T/q, O/q].  inner: the whole J."""
    y = np.zeros((x.shape[0], w.shape[1]), x.dtype)
    for k, size in [(k, shares(inner, grid.row.size)[k]) for k in grid.steps()]:
        y += product(along(x, grid.row, k, (x.shape[0], size)), along(w, grid.column, k, (size, w.shape[1])))
    return all_reduce(y, grid.depth)


def backward(dy, x, w, grid: Grid, inner: int):
    """dy [T/q, O/q] -> dx [T/q, J/q], dw [J/q, O/q]."""
    dx, dw = np.zeros_like(x), np.zeros_like(w)
    for k, size in [(k, shares(inner, grid.row.size)[k]) for k in grid.steps()]:
        dx_k = reduce(product(dy, along(w, grid.column, k, (size, w.shape[1])).T), grid.row, k)
        dw_k = reduce(product(along(x, grid.row, k, (x.shape[0], size)).T, dy), grid.column, k)
        dx, dw = dx if dx_k is None else dx_k, dw if dw_k is None else dw_k
    return all_reduce(dx, grid.depth), all_reduce(dw, grid.depth)


def along(mine, axis, root: int, shape) -> np.ndarray:
    """The block of one rank of a grid row or column, on all of them."""
    return broadcast(mine if axis.index == root else np.empty(shape, mine.dtype), axis, root)


def product(a, b) -> np.ndarray:
    """One product of blocks."""
    watch.op("summa", 2 * a.shape[0] * a.shape[1] * b.shape[1])
    return a @ b


def sent_forward(tokens: int, inner: int, out: int, q: int) -> int:
    """Elements that all ranks of a grid send, forward; a copy of the grid sends its share of the steps."""
    return (q - 1) * (tokens * inner + inner * out)


def sent_by_one_dimension(tokens: int, out: int, p: int) -> int:
    """The same of a row-parallel map on p ranks in a ring: the all_reduce of y."""
    return 2 * (p - 1) * tokens * out
