"""Stores every worker's output in the run's folder, byte for byte."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from dtrain.launchplan import names
from dtrain.messages.decode import ProtocolError
from dtrain.node.descriptors import closing_fd
from dtrain.records import dataclass
from dtrain.runs import arrival_times
from dtrain.runs.storage import storing
from dtrain.runs.stored_file import open_output, stored_reader

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""In a run's folder, which no other user can change. If a pipe is in a file's place, to open it
fails at once. A file that its user removes during the run is made again, with the old offsets."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One output file of one process; its bytes are in ``path`` on this machine."""

    host: str
    role: str
    index: int
    rank: int | None
    fd: Literal["stdout", "stderr"]
    path: Path
    attempt: int = 1

    @property
    def label(self) -> str:
        return names.label(self.role, self.index, self.rank)


class LogWriter:
    """Stores one stream's bytes. Not for use by two threads at the same time.

    Each piece is in the file when `append` returns, so a killed launcher loses nothing. The file
    is open only during `append`: hundreds of hosts have more streams than a process may open.
    """

    def __init__(
        self, stream: Stream, clock: Callable[[], float] = time.time, arrived: int = 0
    ) -> None:
        """Keeps an existing file's content. ``arrived``: bytes of the stream that were stored
        before and do not come again, even if the user has emptied the file since. Raises
        StorageError if it cannot create the file."""
        self.stream = stream
        self.path = stream.path
        self._clock = clock
        self._second = -1
        with storing(self.path):
            try:
                fd = os.open(self.path, _WRITE, 0o600)
            except FileNotFoundError:  # the first stream of its host
                self.path.parent.parent.mkdir(mode=0o700, exist_ok=True)
                self.path.parent.mkdir(mode=0o700, exist_ok=True)
                fd = os.open(self.path, _WRITE, 0o600)
            self.size = max(os.fstat(fd).st_size, arrived)
            os.close(fd)

    def append(self, offset: int, payload: bytes) -> int:
        """Store ``payload``, the stream's bytes from ``offset`` on. Returns the file's new size.

        Skips bytes that are stored already, so a piece may be sent twice. Raises ProtocolError for
        a gap, and StorageError if the file cannot be written; bytes written before the error
        count, and the same piece may be appended again.
        """
        if offset > self.size:
            raise ProtocolError(
                f"{self.path.name}: bytes {self.size} to {offset} of the stream are missing"
            )
        new = memoryview(payload)[self.size - offset :]
        if not new:
            return self.size
        second = int(self._clock())
        with storing(self.path):
            if second != self._second:
                # The time comes first: a reader that sees the output then finds its time. If the
                # time cannot be stored, the output still is.
                with contextlib.suppress(OSError):
                    arrival_times.add(self.path, second, self.size)
                    self._second = second
            with closing_fd(os.open(self.path, _WRITE, 0o600)) as fd:
                if not payload.lstrip(b"\0"):  # perhaps a hole of the worker's file, of gigabytes
                    end = self.size + len(new)
                    if os.fstat(fd).st_size < end:
                        os.ftruncate(fd, end)
                    self.size = end
                    return end
                while new:
                    # Written at its offset, not appended: if two launchers are attached to one
                    # run, they write the same bytes to the same place.
                    written = os.pwrite(fd, new, self.size)
                    self.size += written
                    new = new[written:]
        return self.size

    def is_within_line(self, size: int) -> bool:
        """Whether the first ``size`` bytes end within a line. Raises StorageError."""
        if not size:
            return False
        with (
            storing(self.path),
            contextlib.suppress(FileNotFoundError),
            closing_fd(open_output(self.path)) as fd,
        ):
            # Nothing is there if the user has emptied the file.
            return os.pread(fd, 1, size - 1) not in (b"", b"\n")
        return False


def tail(path: Path, max_bytes: int) -> bytes:
    """The last ``max_bytes`` bytes of a file; empty if it is missing."""
    try:
        with stored_reader(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - max_bytes))
            return file.read(max_bytes)
    except OSError:
        return b""


def changed_since(path: Path, then: float) -> bool:
    """Whether a file has changed after ``then``, in seconds since the epoch."""
    try:
        return path.stat(follow_symlinks=False).st_mtime > then
    except OSError:
        return False
