"""Where this machine stores runs, and the error if it cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtrain.diagnostics import DtrainError, ExitCode, UsageError
from dtrain.node.trust import UnsafeError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


CANNOT_STORE = "this machine cannot store the run's files"
"""Why a launcher stops a job or leaves it. Hosts keep it, so a later launcher knows."""


class StorageError(DtrainError):
    """This machine cannot store the run's files; the message names the file."""

    exit_code = ExitCode.NODE_FAILED


def home() -> Path:
    """``$DTRAIN_HOME`` or ``~/.dtrain``, absolute. Raises UsageError if there is no such home
    folder."""
    named = os.environ.get("DTRAIN_HOME") or "~/.dtrain"
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError:
        raise UsageError(
            f"{named}: this machine has no such home folder",
            hint="set DTRAIN_HOME to a folder for dtrain's files",
        ) from None


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """The block uses ``path``, a file of a run's folder. Raises StorageError for its OSError."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from None


def storage_error(path: Path, error: OSError) -> StorageError:
    """The error for a file of a run's folder that cannot be written."""
    if isinstance(error, UnsafeError):
        return StorageError(f"this machine: {error.reason}", hint=error.hint("DTRAIN_HOME"))
    reason = error.strerror or str(error)
    if error.errno in _NO_SPACE:
        hint = "free some space on this machine, or name a folder on another disk in DTRAIN_HOME"
    elif error.errno in _NO_DESCRIPTOR:
        hint = "raise the limit on open files (ulimit -n), or close other programs"
    elif isinstance(error, FileNotFoundError) and home().is_dir():
        hint = "the run's folder was removed during the run"
    else:
        hint = "name a folder that you can write to in DTRAIN_HOME"
    return StorageError(f"this machine: {path}: cannot store the run's files: {reason}", hint=hint)
