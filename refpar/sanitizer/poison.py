"""Poison: what a receive buffer holds until its wait, so that nobody can use it by mistake and go on.

Each receive has a number.  Its buffer is filled with NaN that carry the number in bits that arithmetic hands on: what is computed
from such a buffer is the same NaN, and where it turns up, in a message or in a result, it names the receive that was read too
early.  (float32: 2 bits of mark and 21 of number; float64: the same bits as a cast makes of them.)  Other dtypes are filled with
ones: -1, or the largest number.
"""
from __future__ import annotations

from itertools import count
from linecache import getline

import numpy as np

from refpar.sanitizer.report import errand_text

NUMBERS = 2**21 - 1
BITS = {4: (np.uint32, 0), 8: (np.uint64, 29)}                  # bytes of a float -> (whole numbers of that size, shift)
MARK = {4: 0xFFE00000, 8: 0xFFFC000000000000}                   # NaN that no arithmetic makes by itself


def _bits(array):
    """The floats of a C-contiguous array as whole numbers, with their size; or its bytes, with size 1."""
    size = {"f": array.dtype.itemsize, "c": array.dtype.itemsize // 2}.get(array.dtype.kind, 1)
    size = size if size in BITS else 1
    return array.reshape(array.size).view(BITS[size][0] if size in BITS else np.uint8), size


def _of(size: int, number: int) -> int:
    return MARK[size] | number % NUMBERS << BITS[size][1] if size in BITS else 255


def fill(array, number: int):
    """Fill `array` with the poison of receive `number`."""
    bits, size = _bits(array)
    bits[:] = _of(size, number)


def untouched(array, number: int) -> bool:
    """Whether `array` still is as `fill` left it."""
    bits, size = _bits(array)
    return not bits.size or int(bits.min()) == int(bits.max()) == _of(size, number)


def found(array) -> int | None:
    """The number (modulo NUMBERS) of a receive whose poison is in `array`: the largest one; None where there is none."""
    if array.dtype.kind not in "fc" or not array.size:
        return None
    bits, size = _bits(array)
    most = int(bits.max())                                      # negative NaN with high bits: no other float is larger
    return None if size not in BITS or most < MARK[size] else (most - MARK[size]) >> BITS[size][1]


class Receives:
    """The receives of a run, by number; old ones are forgotten."""
    numbers = count(1)          # of the whole process: no run takes the poison of another, in memory used again, for its own
    most = 4096

    def __init__(self):
        self.posted: dict[int, tuple] = {}

    def add(self, request) -> int:
        """Number a receive."""
        number = next(self.numbers) % NUMBERS
        array = request.array
        self.posted[number] = request.wire.rank, request.peer, request.tag, array.dtype, array.shape, request.site, request.errand
        if len(self.posted) > self.most:
            del self.posted[next(iter(self.posted))]
        return number

    def read_in(self, array) -> str | None:
        """The receive whose buffer's poison is in `array`, in words."""
        told = self.posted.get(found(array))
        if told is None:
            return None
        rank, source, tag, dtype, shape, site, errand = told
        return (f"rank {rank} receives {dtype} {list(shape)} from rank {source}, tag {tag}, by  "
                f"{getline(site.file, site.line).strip()}  ({site}){errand_text(errand)}")
