"""The seconds in which a stream's output arrived, in a hidden file beside it.

The output is stored byte for byte, so its times are separate. An entry has a second since the
epoch, and the offset in the stream where the output of that second begins.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dtrain.node.descriptors import closing_fd
from dtrain.runs.stored_file import open_output

_ENTRY = struct.Struct("<IQ")
_BLOCK = 256
"""Entries that are read at once: a reader may follow thousands of streams of many days."""


def add(stream: Path, second: int, offset: int) -> None:
    """What comes from ``offset`` on arrives in ``second`` or later. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with closing_fd(os.open(_beside(stream), flags, 0o600)) as fd:
        # Over half an entry, which a full disk has left.
        end = os.fstat(fd).st_size // _ENTRY.size * _ENTRY.size
        os.pwrite(fd, _ENTRY.pack(second, offset), end)


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
            # The last entry that is not after ``begin`` has the second.
            self._done = max(0, _first(self._path, 1, begin + 1)[0] - 1) * _ENTRY.size
        while begin < end:
            while (entry := self._next or self._load()) and entry[1] <= begin:
                self._second, self._next = entry[0], next(self._block, None)
            begin = entry[1] if entry and entry[1] < end else end
            yield self._second, begin

    def _load(self) -> tuple[int, int] | None:
        data = _read(self._path, self._done)
        self._done += len(data)
        self._block = _ENTRY.iter_unpack(data)
        self._next = next(self._block, None)
        return self._next


def offset_at(stream: Path, then: float) -> int | None:
    """Where the output that arrived at ``then``, in seconds since the epoch, or later begins; None
    if all is older. What came before the first time may be as young as that."""
    number, offset = _first(_beside(stream), 0, int(then))
    return offset if number else 0


def _first(path: Path, field: int, least: int) -> tuple[int, int | None]:
    """The number of the first entry whose ``field`` is at least ``least``, and its offset; the
    number of all entries and None if there is no such entry. Reads a few entries only."""
    # struct.error: the file has become shorter
    with suppress(OSError, struct.error), closing_fd(open_output(path)) as fd:
        entries = range(os.fstat(fd).st_size // _ENTRY.size)

        def entry(number: int) -> tuple[int, int]:
            return _ENTRY.unpack(os.pread(fd, _ENTRY.size, number * _ENTRY.size))

        found = bisect_left(entries, least, key=lambda number: entry(number)[field])
        return found, entry(found)[1] if found < len(entries) else None
    return 0, None  # a run of an earlier version has no such file


def _read(path: Path, begin: int) -> bytes:
    """The next entries from the byte ``begin`` on."""
    try:
        with os.fdopen(open_output(path), "rb") as file:
            file.seek(begin)
            data = file.read(_BLOCK * _ENTRY.size)
    except OSError:  # a run of an earlier version has no such file
        return b""
    return data[: len(data) // _ENTRY.size * _ENTRY.size]


def _beside(stream: Path) -> Path:
    return stream.with_name(f".{stream.name}.times")
