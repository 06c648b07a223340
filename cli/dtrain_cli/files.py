"""The user's own text files, as `dtrain plan --output` reads and replaces them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from dtrain.diagnostics import UsageError
from dtrain.spec.load import contents


def read_text(path: Path) -> str | None:
    """A cluster file's text with its line endings and byte-order mark; None if there is no file.

    Bytes that are not UTF-8 come back as they were when `write_text` writes them. Raises
    UsageError if there is a file that cannot be read or replaced, or no place for one.
    """
    target = _target(path)
    return contents(path).decode("utf-8", "surrogateescape") if target.exists() else None


def write_text(path: Path, text: str) -> None:
    """Make ``text`` the file's content, or leave the file as it was: nobody sees it half written.

    An existing file keeps its mode, and its owner and group where that is allowed; a link keeps
    leading to it. Raises UsageError, naming the file, if it cannot be written or is no plain file.
    """
    target = _target(path)
    draft = target.with_name(f".dtrain-{token_hex(8)}")
    try:
        try:
            _create(draft, target, text.encode("utf-8", "surrogateescape"))
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{str(path)!r} cannot be written: {_reason(error)}",
            hint=f"name a file in a folder that you can write to, not in {str(target.parent)!r}",
        ) from None


def _target(path: Path) -> Path:
    """The plain file, or the place for one, that ``path`` leads to. Raises UsageError."""
    try:
        target = path.resolve() if path.is_symlink() else path
        if path.is_symlink() and not target.exists():
            raise UsageError(
                f"{str(path)!r} is a link to {str(target)!r}, which does not exist",
                hint="remove the link, or name the file itself",
            )
        if not target.parent.is_dir():
            raise UsageError(
                f"{str(path)!r} cannot be written: there is no folder {str(target.parent)!r}",
                hint=f"mkdir -p {str(target.parent)!r}",
            )
        if target.is_dir():
            raise UsageError(f"{str(path)!r} is a folder", hint="name a file in it")
        if target.exists() and not target.is_file():
            raise UsageError(
                f"{str(path)!r} is no plain file, but a device or a pipe",
                hint="name a file such as cluster.yaml",
            )
        if target.exists() and not os.access(target, os.W_OK, effective_ids=True):
            raise UsageError(
                f"{str(path)!r} is protected against writing", hint=f"chmod u+w {str(path)!r}"
            )
    except (OSError, ValueError, RuntimeError) as error:
        # A NUL or 5,000 characters in the name, a loop of links, a folder that may not be entered.
        raise UsageError(f"{str(path)!r} cannot be written: {_reason(error)}") from None
    return target


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return (reason or str(error)).lower()


def _create(draft: Path, target: Path, data: bytes) -> None:
    """Write a new file that is to take the place of ``target``, down to the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    now = target.stat() if target.exists() else None
    # A file that others may not read is not for them to read while it is being written either.
    with os.fdopen(os.open(draft, flags, 0o600 if now else 0o666), "wb") as file:
        file.write(data)
        file.flush()
        if now:
            with suppress(PermissionError):
                os.fchown(file.fileno(), now.st_uid, now.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(now.st_mode))
        os.fsync(file.fileno())
