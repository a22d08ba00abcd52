"""Memory that is freed and soon asked for again stays with the process."""
from __future__ import annotations

import ctypes
import sys

# From glibc's malloc.h: how much of the heap's free top is too much to keep, and how many arrays may have pages of their own.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4


def keep_pages() -> bool:
    """Let glibc keep the pages of freed arrays for the next ones; true if it will.

    By default a large array gets fresh pages from the system and gives them back when it is freed.  A training step makes and frees
    the same large arrays again and again, and each fresh page costs a fault and is filled with zeros: about a tenth of a step.
    It concerns the whole process, so only a command may call it.  Elsewhere than on Linux with glibc it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:                                             # another C library
        return False
    largest = 2**31 - 1
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, largest))
