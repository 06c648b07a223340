"""Files without a name. A killed process leaves none, and on Linux they need no writable folder."""

from __future__ import annotations

import errno
import os
from typing import BinaryIO

STDIN = "/dev/stdin"
"""The name under which a program can open such a file again, if it is its stdin. On Linux, it reads
from the beginning each time; elsewhere, only the first time."""

_UNSUPPORTED = (errno.ENOSYS, errno.EPERM, errno.EACCES)


def memory_file(content: bytes = b"") -> BinaryIO:
    """A file to write to, or one with ``content`` to be read from its beginning. Raises OSError."""
    file: BinaryIO
    try:
        file = os.fdopen(os.memfd_create("dtrain"), "w+b")
    except (AttributeError, OSError) as error:  # not Linux, or the kernel lacks or forbids it
        if isinstance(error, OSError) and error.errno not in _UNSUPPORTED:
            raise
        import tempfile  # slow to import

        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(content)
    file.seek(0)
    return file
