"""The files of a run's folder on the launching machine, which another user or a crash may have
changed."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from dtrain.diagnostics import UsageError
from dtrain.node.trust import Trust, UnsafeError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def open_stored(path: Path, flags: int) -> int:
    """A file descriptor of a file that dtrain reads back and acts on.

    Raises UnsafeError if another user could change it, and OSError.
    """
    return Trust().open_path(os.fsencode(path), flags)


def open_output(path: Path) -> int:
    """A file descriptor to read a worker's output. Raises OSError, also for anything but a regular
    file: it never waits for the other end of a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def unreadable(path: Path, error: OSError) -> UsageError:
    """The error for a stored file that cannot be opened or read."""
    if isinstance(error, UnsafeError):
        return UsageError(error.reason, hint=error.hint("DTRAIN_HOME"))
    return UsageError(f"{path}: cannot be read: {error.strerror}")
