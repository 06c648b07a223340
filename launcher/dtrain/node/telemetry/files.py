"""Writes the telemetry files of a run."""

from __future__ import annotations

import contextlib
import os

from dtrain.node.agent.wire import encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.wire import Json

NOW, STORED = b"telemetry-now", b"telemetry"
"""The files in the run's folder."""
MAX_STORED = 24 << 20
"""Bytes of averages that a host keeps: at least a day with 8 GPUs."""
MAX_NOW = 1 << 16
"""Bytes of one sample."""


class Files:
    """The two files of the run's folder. A worker can remove them, which only ends the samples. A
    full disk loses those that it has no room for."""

    def __init__(self, folder: int) -> None:
        self._folder = folder
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._now = os.open(NOW, flags, 0o600, dir_fd=folder)
        self._flags = flags
        self._stored = os.open(STORED, flags, 0o600, dir_fd=folder)
        self._size = 0

    def show(self, sample: Json) -> None:
        line = encode(sample) + b"\n"
        if len(line) <= MAX_NOW:
            with contextlib.suppress(OSError):
                os.ftruncate(self._now, os.pwrite(self._now, line, 0))

    def store(self, sample: Json) -> None:
        line = encode(sample) + b"\n"
        if len(line) > MAX_NOW:
            return
        with contextlib.suppress(OSError):
            if self._size + len(line) > MAX_STORED:
                self._drop_half()
            if os.pwrite(self._stored, line, self._size) == len(line):
                self._size += len(line)
            else:
                os.ftruncate(self._stored, self._size)

    def _drop_half(self) -> None:
        """Replace the file by its second half. A relay sees that the file is shorter now."""
        data = os.pread(self._stored, self._size, self._size // 2).partition(b"\n")[2]
        draft = b".telemetry"
        fd = os.open(draft, self._flags | os.O_TRUNC, 0o600, dir_fd=self._folder)
        try:
            size = os.pwrite(fd, data, 0)
            os.rename(draft, STORED, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            os.close(fd)
            raise
        os.close(self._stored)
        self._stored, self._size = fd, data.rfind(b"\n", 0, size) + 1
        os.ftruncate(fd, self._size)
