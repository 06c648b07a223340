"""The memory of this process."""

import contextlib
import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt(3)
_LARGEST_BLOCK, _MOST_KEPT = 1 << 20, 8 << 20


def tune_heap() -> None:
    """Let all threads allocate from one heap, which keeps its free memory. Call it before other
    threads start.

    glibc has up to eight heaps for each core, and each keeps the most that its threads ever needed:
    a third of the memory that a host costs. One is enough for Python, whose threads take turns.
    glibc also returns each block of 128 kB and more to the kernel, and new pages take a third of
    the time to show output.
    """
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
