"""What a failed process wrote about its end."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from dtrain.failures.catalogue import FROM_OUTSIDE
from dtrain.failures.cause import Failure
from dtrain.failures.launchers import root_words, words_of_rank
from dtrain.failures.traceback import headline, is_traceback, last_words
from dtrain.launchplan import names
from dtrain.runs.log_store import changed_since, tail

_STDERR_TAIL = 1 << 20
"""Bytes at the end of a process's stderr in which its last traceback is searched."""
_AT_EXIT = 15
"""Lines that a process may write after the exception with which it ends. JAX's coordination service
writes 13 before it aborts the process."""
_CACHED = 1 << 14
"""Files whose end is parsed once: thousands of workers may fail, each parse takes milliseconds, and
the first cause is looked for several times."""
_ABORT = re.compile(
    rb"^(?:F\d{4} \d\d:\d\d:\d\d\.|terminate called |Fatal Python error: Aborted)", re.MULTILINE
)
"""Begins the report of a C++ library (glog, Abseil) that aborts the process, or of its runtime."""


def explained(failure: Failure, logs: Path, since: float | None = None) -> Failure:
    """The failure with the end of the process's stderr, if it left no traceback.

    With ``since``, only a traceback that arrived after this time counts: the process was killed,
    so an earlier one was caught.
    """
    if failure.traceback:
        return failure
    written_by = [names.process_name(failure.role, failure.index)]
    if failure.rank is not None:
        written_by.append(names.rank_name(failure.rank))
    for name in written_by:
        file = logs / failure.host / f"{name}.err"
        if since is None:
            aborted, uncaught = failure.ended_by == "SIGABRT", failure.code == 1
            output = _last_words(file, _version(file), aborted=aborted, uncaught=uncaught)
        else:
            output = _raised(file, _version(file)) if changed_since(file, since) else ""
        if output:
            return _with_words(failure, output)
    return failure


def _version(file: Path) -> tuple[int, int]:
    """Changes with the content of a file."""
    try:
        status = file.stat(follow_symlinks=False)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


@lru_cache(_CACHED)
def _last_words(file: Path, version: tuple[int, int], *, aborted: bool, uncaught: bool) -> str:
    written = tail(file, _STDERR_TAIL)
    # A process that ends with an exception may abort at its exit.
    before = _before_abort(written) if aborted else b""
    raised = last_words(before, stale_after=_AT_EXIT, plain_lines=0)
    return raised or root_words(written, uncaught=uncaught)


@lru_cache(_CACHED)
def _raised(file: Path, version: tuple[int, int]) -> str:
    """The traceback at the end of a stderr; empty if there is none."""
    written = _before_abort(tail(file, _STDERR_TAIL))
    output = root_words(written, uncaught=False, stale_after=_AT_EXIT)
    return output if is_traceback(output) else ""


def explained_by_torchrun(failure: Failure, logs: Path, torchrun: str) -> Failure:
    """As `explained`, for a rank whose stderr is that of its ``torchrun``, the name of a
    process."""
    if failure.traceback or failure.rank is None or failure.signal is not None:
        return failure
    written = tail(logs / failure.host / f"{torchrun}.err", _STDERR_TAIL)
    return _with_words(failure, words_of_rank(written, failure.rank))


def _with_words(failure: Failure, output: str) -> Failure:
    killed = failure.ended_by in FROM_OUTSIDE  # no line explains this
    message = failure.message or ("" if killed else headline(output))
    return replace(failure, traceback=output, message=message)


def _before_abort(stderr: bytes) -> bytes:
    """``stderr`` without the report of an abort after the last traceback."""
    abort = _ABORT.search(stderr, max(0, stderr.rfind(b"Traceback (most recent")))
    return stderr[: abort.start()] if abort else stderr
