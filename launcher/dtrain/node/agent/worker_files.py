"""Reads files that a worker can write or replace, and trusts none of them.

Workers run as the same user, so every name in the run's folder may be a FIFO, a link, a device or
a file with any content. No function here blocks, follows a link, or reads without a limit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat

from dtrain.node.descriptors import closing_fd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dtrain.node.agent.wire import Json

MAX_DEPTH = 16
"""Levels of nesting in a JSON line."""
MAX_READ = 1 << 20
"""Bytes that one read of a growing file returns."""


class GrowingFile:
    """How far a file that only grows has been read."""

    def __init__(self, number: int, offset: int) -> None:
        self.number = number
        """That of its stream."""
        self.offset = offset
        self._lost_at = -1

    def is_truncated(self, size: int) -> bool:
        """Whether bytes that were read are gone; true once. ``size``: of the file now."""
        if size >= self.offset or self._lost_at == self.offset:
            return False
        self._lost_at = self.offset
        return True

    def truncation(self, name: str) -> str:
        """What to tell the user."""
        text = "%s was truncated: its output is missing until it again has %d bytes"
        return text % (name, self.offset)


def open_regular(path: bytes) -> int:
    """Open a regular file of this user for reading. Raises OSError for anything else."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except ValueError:  # a NUL in the name
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path) from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(fd)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
    return fd


def read_regular(path: bytes, limit: int, start: int = 0) -> bytes | None:
    """Up to ``limit`` bytes from ``start`` on. A negative ``start`` counts from the end. None if
    the file cannot be read."""
    try:
        fd = open_regular(path)
    except OSError:
        return None
    try:
        size = os.fstat(fd).st_size
        if start < 0:
            start = max(0, size + start)
        return os.pread(fd, max(0, min(limit, size - start)), start)
    except (OSError, OverflowError):
        return None
    finally:
        os.close(fd)


def size_of(path: bytes) -> int:
    """The size of a regular file in bytes; 0 if it cannot be opened."""
    try:
        fd = open_regular(path)
    except OSError:
        return 0
    with closing_fd(fd):
        return os.fstat(fd).st_size


class Lines:
    """The lines of a growing file from ``offset`` on."""

    def __init__(self, file: bytes | int, offset: int, limit: int, end: bytes = b"") -> None:
        """``file`` is a path or an open file. A line has at most ``limit`` bytes. The data end at
        the byte ``end``, if given."""
        self._file, self._limit, self._end = file, limit, end
        self._skipping = False  # the rest of a line that is too long
        self.offset = offset

    def _read(self) -> bytes:
        if isinstance(self._file, bytes):
            return read_regular(self._file, MAX_READ, self.offset) or b""
        with contextlib.suppress(OSError, OverflowError):
            return os.pread(self._file, MAX_READ, self.offset)
        return b""

    def skip_to_last(self, path: bytes) -> None:
        """Leave out all but the last `MAX_READ` bytes of the file at ``path``."""
        start = size_of(path) - MAX_READ
        if start > self.offset:
            self.offset = start
            self._skipping = True

    def read(self) -> list[tuple[bytes | None, int]]:
        """The new complete lines, each with the offset of the next one. None represents a line
        that is too long."""
        data = self._read()
        if self._end:
            data = data.partition(self._end)[0]
        *lines, rest = data.split(b"\n")
        found: list[tuple[bytes | None, int]] = []
        for line in lines:
            self.offset += len(line) + 1
            if not self._skipping:
                found.append((line if len(line) <= self._limit else None, self.offset))
            self._skipping = False
        if self._skipping or len(rest) > self._limit:
            self.offset += len(rest)
            if not self._skipping:
                found.append((None, self.offset))
            self._skipping = True
        return found


def last_line(path: bytes, limit: int) -> int:
    """The offset of a file's last line, if it is not longer than ``limit``."""
    start = max(0, size_of(path) - limit)
    return start + (read_regular(path, limit, start) or b"").rstrip().rfind(b"\n") + 1


def integer(text: str) -> int:
    """Parses an integer in JSON. Raises ValueError if it has more than 64 bits."""
    number = int(text) if len(text) <= 20 else 1 << 64
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError("an integer of more than 64 bits")
    return number


def decode(line: bytes) -> Json | None:
    """A JSON object; None for anything else, and if it is nested too deep."""
    try:
        body = json.loads(line, parse_int=integer)
    except (ValueError, RecursionError, MemoryError):
        return None
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
    deep = any(isinstance(each, (dict, list)) for each in level)
    return body if isinstance(body, dict) and not deep else None
