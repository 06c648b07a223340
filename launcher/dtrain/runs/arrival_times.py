"""The seconds in which a stream's output arrived, in a hidden file beside it.

The output is stored byte for byte, so its times are separate. An entry has a second since the
epoch, and the offset in the stream where the output of that second begins.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

from dtrain.runs.stored_file import open_output

_ENTRY = struct.Struct("<IQ")
_BLOCK = 256
"""Entries that are read at once: a reader may follow thousands of streams of many days."""


def add(stream: Path, second: int, offset: int) -> None:
    """What comes from ``offset`` on arrives in ``second`` or later. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(_beside(stream), flags, 0o600)
    try:
        # Over half an entry, which a full disk has left.
        end = os.fstat(fd).st_size // _ENTRY.size * _ENTRY.size
        os.pwrite(fd, _ENTRY.pack(second, offset), end)
    finally:
        os.close(fd)


class ArrivalTimes:
    """When the lines of one stream arrived, from its beginning to its end."""

    def __init__(self, stream: Path) -> None:
        self._path = _beside(stream)
        self._done = 0
        """Bytes of the file that have been read."""
        self._block: Iterator[tuple[int, int]] = iter(())
        self._next: tuple[int, int] | None = None
        self._second: int | None = None

    def parts(self, begin: int, end: int) -> Iterator[tuple[int | None, int]]:
        """Cut the stream between two offsets by arrival: the second, or None if it is unknown, and
        the offset where that part ends. ``begin`` never goes back from call to call."""
        if not self._done and begin:
            self._done = _entries_before(self._path, begin) * _ENTRY.size
        while begin < end:
            while (entry := self._next or self._load()) and entry[1] <= begin:
                self._second, self._next = entry[0], next(self._block, None)
            begin = entry[1] if entry and entry[1] < end else end
            yield self._second, begin

    def _load(self) -> tuple[int, int] | None:
        data = _read(self._path, self._done, _BLOCK)
        self._done += len(data)
        self._block = _ENTRY.iter_unpack(data)
        self._next = next(self._block, None)
        return self._next


def offset_at(stream: Path, then: float) -> int | None:
    """Where the output that arrived at ``then``, in seconds since the epoch, or later begins; None
    if all is older. What came before the first time may be as young as that."""
    entries = list(_ENTRY.iter_unpack(_read(_beside(stream), 0)))
    if not entries or entries[0][0] >= int(then):
        return 0
    return next((offset for second, offset in entries if second >= int(then)), None)


def _entries_before(path: Path, offset: int) -> int:
    """How many entries only concern output before ``offset``."""
    try:
        fd = open_output(path)
    except OSError:
        return 0
    try:
        entries = range(os.fstat(fd).st_size // _ENTRY.size)

        def begin(number: int) -> int:
            found: int = _ENTRY.unpack(os.pread(fd, _ENTRY.size, number * _ENTRY.size))[1]
            return found

        return max(0, bisect_right(entries, offset, key=begin) - 1)
    finally:
        os.close(fd)


def _read(path: Path, begin: int, count: int = -1) -> bytes:
    """Whole entries."""
    try:
        with os.fdopen(open_output(path), "rb") as file:
            file.seek(begin)
            data = file.read(max(-1, count * _ENTRY.size))
    except OSError:  # a run of an earlier version has no such file
        return b""
    return data[: len(data) // _ENTRY.size * _ENTRY.size]


def _beside(stream: Path) -> Path:
    return stream.with_name(f".{stream.name}.times")
