"""The names of runs, and the files in their folders, which somebody may have damaged."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def open_stored(path: Path, flags: int, mode: int = 0o600) -> int:
    """A file descriptor of the regular file ``path``. Never waits for the other end of a pipe.

    Raises OSError, also for a symbolic link, a folder, a pipe or a device.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd
