"""Explains why a file that the user has named cannot be read."""

from __future__ import annotations

import errno
from pathlib import Path

from dtrain.diagnostics import UsageError
from dtrain.spec.problems import nearest


def unreadable(path: Path, error: OSError | ValueError, *, kind: str, missing: str) -> UsageError:
    """The error for a ``path`` that could not be read. ``kind`` matches the names of files of its
    kind, such as ``*.json``. ``missing`` is the hint if there is no file with a similar name."""
    name = repr(str(path))
    if isinstance(error, FileNotFoundError):
        close = _similar(path, kind)
        return UsageError(
            f"there is no file {name}", hint=f"did you mean {close!r}?" if close else missing
        )
    if isinstance(error, IsADirectoryError):
        return UsageError(f"{name} is a folder", hint="name the file in it")
    reason = error.strerror if isinstance(error, OSError) else None
    hint = ""
    if isinstance(error, PermissionError):
        hint = f"try: ls -l {name}"
    elif isinstance(error, OSError) and error.errno == errno.ELOOP:
        reason = "its links lead back to themselves"
        hint = f"name the file itself, or replace the link: ls -l {name}"
    elif isinstance(error, NotADirectoryError):
        hint = "a part of the path is a file, not a folder"
    return UsageError(f"{name} cannot be read: {(reason or str(error)).lower()}", hint=hint)


def _similar(path: Path, kind: str) -> str | None:
    try:
        names = {one.stem: one.name for one in path.parent.glob(kind)}
        close = nearest(path.stem, names)
    except (OSError, ValueError):
        return None
    return str(path.with_name(names[close])) if close else None
