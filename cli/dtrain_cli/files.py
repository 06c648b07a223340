"""Read and replace the user's text files, as for `dtrain plan --output`."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from dtrain.diagnostics import UsageError
from dtrain.node.trust import user_of
from dtrain.spec.load import contents


def read_text(path: Path) -> str | None:
    """Return a cluster file's text with its line endings and byte-order mark, or None if the file
    does not exist.

    `write_text` restores bytes that are not UTF-8. Raises UsageError if the file cannot be read or
    replaced, or if its folder does not exist.
    """
    target = _target(path)
    return contents(path).decode("utf-8", "surrogateescape") if target.exists() else None


HTML, JSON, METRICS = "<!doctype html", "{", ("# help dtrain_", "# eof")
"""How the files that dtrain writes begin."""


def writable(path: Path, begins: str | tuple[str, ...] = "") -> bool:
    """Return whether there is a file to replace. For use before the long work whose result
    `write_text` gets.

    Raises UsageError if `write_text` would refuse the path, if its folder is read-only, or if the
    file has a content that does not begin with ``begins`` (in any case): dtrain did not write it.
    """
    refuse_planted(path)
    target = _target(path)
    if not os.access(target.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise _unwritable(path, target, "its folder is read-only")
    content = read_text(path)
    if content and not content[:80].lower().startswith(begins):
        raise UsageError(
            f"{str(path)!r} was not written by dtrain, so it is not replaced",
            hint="name a new file, or remove this one",
        )
    return content is not None


def write_text(path: Path, text: str, *, public: bool = False) -> None:
    """Replace the file's content with ``text`` atomically.

    An existing file keeps its mode, and its owner and group if permissions allow; links to it stay
    valid. With ``public``, all users may read a new file, whatever the umask. Raises UsageError,
    naming the file, if it is not a plain file or cannot be written.
    """
    refuse_planted(path)
    target = _target(path)
    draft = target.with_name(f".dtrain-{token_hex(8)}")
    try:
        try:
            _create(draft, target, text.encode("utf-8", "surrogateescape"), public=public)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise _unwritable(path, target, _reason(error)) from None


def refuse_planted(path: Path) -> None:
    """Raise UsageError if another user has put ``path`` into a folder that all users share, such as
    /tmp. It may be a link to a file of this user."""
    try:
        there, folder = path.lstat(), path.parent.stat()
    except (OSError, ValueError):
        return
    shared = folder.st_mode & stat.S_ISVTX and folder.st_mode & stat.S_IWOTH
    if shared and there.st_uid not in (0, os.geteuid(), folder.st_uid):
        owner = user_of(there.st_uid)
        raise UsageError(
            f"{str(path)!r} belongs to {owner}, in a folder that all users share",
            hint="choose another name, in a folder of your own",
        )


def _unwritable(path: Path, target: Path, reason: str) -> UsageError:
    return UsageError(
        f"{str(path)!r} cannot be written: {reason}",
        hint=f"name a file in a folder that you can write to, not in {str(target.parent)!r}",
    )


def _target(path: Path) -> Path:
    """Resolve ``path`` to a plain file or to a path where one can be created.

    Raises UsageError.
    """
    try:
        target = path.resolve() if path.is_symlink() else path
        if path.is_symlink() and not target.exists():
            raise UsageError(
                f"{str(path)!r} is a link to {str(target)!r}, which does not exist",
                hint="remove the link, or name the file itself",
            )
        if not target.parent.is_dir():
            raise UsageError(
                f"{str(path)!r} cannot be written: no such folder {str(target.parent)!r}",
                hint=f"mkdir -p {str(target.parent)!r}",
            )
        if str(path) == "-":
            raise UsageError("'-' would be a file of this name", hint="name a file to write")
        if target.is_dir():
            raise UsageError(f"{str(path)!r} is a folder", hint="name a file in it")
        if target.exists() and not target.is_file():
            raise UsageError(
                f"{str(path)!r} is a device or a pipe, not a plain file",
                hint="name a file such as cluster.yaml",
            )
        if target.exists() and not os.access(target, os.W_OK, effective_ids=True):
            raise UsageError(f"{str(path)!r} is read-only", hint=f"chmod u+w {str(path)!r}")
    except (OSError, ValueError, RuntimeError) as error:
        # For example a NUL in the name, a name too long, a loop of links, a folder without access.
        raise UsageError(f"{str(path)!r} cannot be written: {_reason(error)}") from None
    return target


def _reason(error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else None
    return (reason or str(error)).lower()


def _create(draft: Path, target: Path, data: bytes, *, public: bool) -> None:
    """Write and sync a new file that will replace ``target``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    now = target.stat() if target.exists() else None
    # Create the draft private: others must not read a private file while dtrain writes it.
    with os.fdopen(os.open(draft, flags, 0o600 if now else 0o666), "wb") as file:
        file.write(data)
        file.flush()
        if now:
            with suppress(PermissionError):
                os.fchown(file.fileno(), now.st_uid, now.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(now.st_mode))
        elif public:
            os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
