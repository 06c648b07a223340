"""Errors, as values and exceptions.

The exception tree, with the exit code of each branch:

    DtrainError
    ├── InternalError   70   dtrain itself is wrong
    ├── SpecError        2   the cluster file is wrong; carries every problem found
    ├── UsageError       2   a request is wrong: an option, an argument, the name of a run
    ├── StoppedError   130   the user stopped it before it had started anything
    ├── StorageError     3   this machine cannot store the run's files
    ├── BackgroundError  3   the launcher in the background did not start
    ├── OutputError      3   standard output cannot be written
    ├── OutputClosedError 141  the reader of standard output is gone
    ├── LimitError       3   this machine lets dtrain start no more threads, or open no more files
    └── NodeError        3   a host could not be reached or prepared
        ├── ConnectError     no connection (name, route, port, timeout)
        ├── HostKeyError     the host key has changed or is unknown
        ├── AuthError        the host refused every key offered
        ├── AnswerError      connected, but the host sent an invalid answer
        └── PrepareError     connected, but the job cannot start there
            └── PortBusyError    ... because a port is taken

Every message states the place and the problem. Every hint contains the remedy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from enum import IntEnum

from dtrain.records import dataclass


class ExitCode(IntEnum):
    """The documented exit codes of every `dtrain` command."""

    OK = 0
    JOB_FAILED = 1
    """Of `dtrain plan`: no layout fits."""
    INVALID = 2
    NODE_FAILED = 3
    INTERNAL = 70
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    """The reader of its output is gone. Shells report the same for a death by SIGPIPE."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a text file: line and column from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a cluster file.

    ``source_line`` is the text of the line at ``position``; ``width`` is the number of characters
    that the caret underlines.
    """

    message: str
    position: Position | None = None
    source_line: str = ""
    width: int = 1
    hint: str = ""


class DtrainError(Exception):
    """A failure with an explanation for the user. Never displayed as a traceback."""

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InternalError(DtrainError):
    """A fault in dtrain itself. Names the file with details for its developers."""


class SpecError(DtrainError):
    """The cluster file is wrong. ``problems`` is never empty and is in file order."""

    exit_code = ExitCode.INVALID

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = tuple(problems)


class UsageError(DtrainError):
    """A request is invalid: an option, an argument, the name of a run, a file that it names."""

    exit_code = ExitCode.INVALID


class StoppedError(DtrainError):
    """A stop request came before anything was started."""

    exit_code = ExitCode.INTERRUPTED


class LimitError(DtrainError):
    exit_code = ExitCode.NODE_FAILED

    @classmethod
    def of(cls, error: Exception) -> LimitError | None:
        """The limit that ``error``, an exception of Python, is about; None if there is none."""
        if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
            return cls(
                "this machine lets dtrain start no more threads; it needs two for each host",
                hint="raise the limit of processes: `ulimit -u`, or pids.max of the container",
            )
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return cls(
                "this machine lets dtrain open no more files",
                hint="raise the limit of open files: `ulimit -n`",
            )
        if isinstance(error, OSError) and error.errno == errno.ENFILE:
            return cls(
                "this machine lets its processes open no more files",
                hint="raise the limit of the whole machine: `sysctl fs.file-max`, as root",
            )
        return None


class NodeError(DtrainError):
    """A host failed. ``attempted`` is the attempted action, as a phrase after "while"."""

    exit_code = ExitCode.NODE_FAILED

    address = ""
    """The address that the texts use, where ssh's configuration gives the host another one than the
    cluster file."""
    jump = ""
    """The jump host that could not be used, if that is the problem."""

    def __init__(self, host: str, attempted: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{host}: {attempted}: {reason}", hint=hint)
        self.host = host
        self.attempted = attempted
        self.reason = reason

    @property
    def shows_contact(self) -> bool:
        """Whether the host has answered, although not as it should."""
        return not self.jump


class ConnectError(NodeError):
    """The connection to the host failed or was lost."""

    shows_contact = False


class HostKeyError(NodeError):
    """The host's key is unknown, or differs from the known one."""


class AuthError(NodeError):
    """The host refused every way of authenticating."""

    asked = False
    """Whether the user already answered a prompt. A retry would only prompt again."""

    @property
    def shows_contact(self) -> bool:
        # It depends on the user, who may be away.
        return super().shows_contact and not self.asked


class AnswerError(NodeError):
    """The host sent data that dtrain's programs never send: it is broken or hostile."""

    def __init__(self, host: str, attempted: str, wrong: object) -> None:
        super().__init__(
            host,
            attempted,
            f"the host sent a malformed answer: {wrong}",
            hint="check what the host's login scripts print; if they print nothing, do not trust "
            "the host",
        )


class PrepareError(NodeError):
    """The host is connected, but the job cannot start there."""


class PortBusyError(PrepareError):
    """Another process listens on a port that the job needs."""


def reason_of(error: Exception) -> str:
    """The reason in an exception of Python, without the error's number."""
    # The numbers of failed look-ups of names are below 0, and their own.
    if isinstance(error, OSError) and (error.errno or 0) > 0:
        return os.strerror(error.errno or 0).lower()
    return str(error.args[-1]) if error.args else str(error)
