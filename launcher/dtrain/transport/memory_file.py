"""Files without a name: no folder must be writable, and a killed process leaves nothing."""

from __future__ import annotations

import os
from typing import BinaryIO

STDIN = "/dev/stdin"
"""The name under which a program can open such a file again, if it is its stdin. On Linux, it reads
from the beginning each time; elsewhere, only the first time."""


def memory_file(content: bytes = b"") -> BinaryIO:
    """A file to write to, or one with ``content`` to be read from its beginning. Raises OSError."""
    file: BinaryIO
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("dtrain"), "w+b")
    else:
        import tempfile  # slow to import

        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file
