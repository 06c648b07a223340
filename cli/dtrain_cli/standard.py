"""Standard output and standard error of a `dtrain` process, with typed errors."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from typing import TextIO

from dtrain.diagnostics import DtrainError, ExitCode


class OutputError(DtrainError):
    """A write to standard output failed, for example because its disk is full."""

    exit_code = ExitCode.NODE_FAILED

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"cannot write to standard output: {error.strerror}",
            hint="free space on its disk, or redirect the output elsewhere",
        )


class OutputClosedError(DtrainError):
    """The reader of standard output is gone, which needs no message."""

    exit_code = ExitCode.OUTPUT_CLOSED

    def __init__(self) -> None:
        super().__init__("standard output was closed")


def unwritable(error: OSError) -> OutputError | OutputClosedError:
    """The error with which a command ends whose output cannot be written."""
    return OutputClosedError() if reader_gone(error) else OutputError(error)


def reader_gone(error: OSError) -> bool:
    """Whether the reader of a pipe or the terminal is gone, in contrast to a full disk.
    ``error`` is from `give_up`."""
    return isinstance(error, BrokenPipeError)


def typed(stream: TextIO | None) -> TextIO | None:
    """Wrap ``stream``: a failed write to stdout raises `unwritable`, and a failed write to stderr
    is dropped, because no stream is left for the report."""
    if stream is None:
        return None
    raw = _Raw(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
    )


def give_up(fd: int, error: OSError) -> OSError:
    """Drop all that is written to ``fd`` from now on. Returns ``error``, or BrokenPipeError if it
    means that a terminal was closed. (On a file, EIO means that its disk or server fails.)"""
    if error.errno in (errno.EIO, errno.ENXIO) and stat.S_ISCHR(os.fstat(fd).st_mode):
        error = BrokenPipeError(errno.EPIPE, error.strerror)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, fd)
    os.close(null)
    return error


class _Raw(io.FileIO):
    def write(self, data: object) -> int:
        try:
            while (written := super().write(data)) is None:  # type: ignore[arg-type]
                # The parent process made this terminal or pipe non-blocking.
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            # With the buffer, or Python's exit would fail on it too.
            error = give_up(self.fileno(), error)
            if self.fileno() == 2:
                return memoryview(data).nbytes  # type: ignore[arg-type]
            raise unwritable(error) from None
