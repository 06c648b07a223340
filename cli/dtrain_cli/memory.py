"""The memory of this process."""

import contextlib
import ctypes

_M_ARENA_MAX = -8  # mallopt(3)


def share_heap() -> None:
    """Let all threads allocate from one heap.

    glibc has up to eight heaps for each core, and each keeps the most that its threads ever needed:
    a third of the memory that a host costs. One is enough for Python, whose threads take turns.
    Call it before other threads start.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
