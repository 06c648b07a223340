"""File descriptors. The nodes and the launching machine run this module."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import Iterator


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Closes a file descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)
