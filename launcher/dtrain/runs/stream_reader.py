"""Reads the stored output of one stream.

If its user empties or removes the file during the run, new output is stored at its old offset, and
the file has a hole before it. A hole reads as zeros, perhaps for gigabytes: readers skip it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from dtrain.node.descriptors import closing_fd
from dtrain.runs.stored_file import open_output

_BLOCK = 64 << 10
"""Bytes that are read at once from the end."""


class StreamReader:
    """Reads a stream from ``offset`` on, a block at once. The file is open only meanwhile: there
    may be more streams than a process may have open files."""

    def __init__(self, path: Path) -> None:
        self.offset = 0
        """Where the next piece begins."""
        self._path = path
        self._block = b""
        self._begin = self._end = 0
        """The offsets of the block."""

    def read(self, until: int, end: int, size: int) -> bytes:
        """The next piece before ``until``; `offset` is then at its end. It may be shorter, and
        empty after a hole. ``end``: the known end of the stream; if there is no more data before
        it, `offset` is then there. ``size``: of a block. Raises OSError."""
        if self.offset >= self._end:
            self._load(end, size)
        piece = self._block[self.offset - self._begin : max(0, until - self._begin)]
        self.offset += len(piece)
        if self.offset >= self._end:
            self._block = b""
        return piece

    def _load(self, end: int, size: int) -> None:
        with closing_fd(open_output(self._path)) as fd:
            self._begin = min(end, _data_from(fd, self.offset))
            self._block = os.pread(fd, min(size, end - self._begin), self._begin)
        self._end = self._begin + len(self._block)
        self.offset = self._begin if self._block else end


def last_lines(path: Path, end: int, count: int) -> tuple[int, int]:
    """Where the last ``count`` lines before ``end`` begin, and how many the file lacks. Reads it
    from its end. Raises OSError."""
    if not count or not end:
        return end, count
    missing = count
    with closing_fd(open_output(path)) as fd:
        # The newline at the end of the last line begins no other line.
        for begin, until in reversed(list(_data(fd, end - 1))):
            for at in range(until, begin, -_BLOCK):
                first = max(begin, at - _BLOCK)
                block = os.pread(fd, at - first, first)
                newlines = block.count(b"\n")
                if newlines < missing:
                    missing -= newlines
                    continue
                place = len(block)
                for _ in range(missing):
                    place = block.rindex(b"\n", 0, place)
                return first + place + 1, 0
        return 0, missing - 1


def _data(fd: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of a file before ``end`` that are no holes."""
    offset = 0
    while (begin := _data_from(fd, offset)) < end:
        try:
            offset = min(end, os.lseek(fd, begin, os.SEEK_HOLE))
        except OSError:
            offset = end
        yield begin, offset


def _data_from(fd: int, offset: int) -> int:
    """Where data begins, from ``offset`` on. Behind all files if there is none."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        # Other errors: the file system does not know its holes.
        return sys.maxsize if error.errno == errno.ENXIO else offset
