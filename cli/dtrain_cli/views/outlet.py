"""Unbuffered standard output and standard error, which handle a reader that goes away."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Callable
from typing import TextIO

from dtrain_cli.standard import give_up


class Outlet:
    """Standard output or standard error, unbuffered: `write` returns after all bytes are written.

    When the reader is gone, ``on_broken`` is called once, with the error. All later output is
    discarded, also what Python flushes at exit.
    """

    def __init__(
        self, stream: TextIO | None, on_broken: Callable[[OSError], None] = lambda error: None
    ) -> None:
        """``stream`` is None if it was closed when the process started."""
        self._on_broken = on_broken
        if stream is None:
            self.fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            self._encoding = "utf-8"
        else:
            stream.flush()
            self.fd = stream.fileno()
            self._encoding = stream.encoding or "utf-8"
        self.terminal = os.isatty(self.fd)
        mode = os.fstat(self.fd).st_mode
        self.pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)

    def write(self, text: str) -> None:
        data = memoryview(text.encode(self._encoding, "replace"))
        while data:
            try:
                data = data[os.write(self.fd, data) :]
            except BlockingIOError:
                # The parent process made this terminal or pipe non-blocking.
                select.select([], [self.fd], [])
            except OSError as error:
                self._on_broken(give_up(self.fd, error))
                return

    @property
    def unicode(self) -> bool:
        """Whether it can show more than ASCII."""
        return self._encoding.lower().startswith("utf")

    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal."""
        try:
            columns, lines = os.get_terminal_size(self.fd)
        except OSError:
            return 80, 24
        return columns or 80, lines or 24

    def same_terminal(self, other: Outlet) -> bool:
        try:
            mine, its = os.fstat(self.fd), os.fstat(other.fd)
        except OSError:
            return False
        return self.terminal and other.terminal and mine.st_rdev == its.st_rdev
