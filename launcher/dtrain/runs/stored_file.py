"""The files of a run's folder on the launching machine, which another user or a crash may have
changed."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from dtrain.diagnostics import UsageError
from dtrain.node.descriptors import closing_fd
from dtrain.node.trust import Trust, UnsafeError

_T = TypeVar("_T")

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_host_name(host: str) -> None:
    """Raise ValueError if ``host`` cannot be the name of a file."""
    if not host or host in (".", "..") or "/" in host or "\0" in host:
        raise ValueError(f"not a host name: {host!r}")


def open_stored(path: Path, flags: int) -> int:
    """A file descriptor of a file that dtrain reads back and acts on.

    Raises UnsafeError if another user could change it, and OSError.
    """
    return Trust().open_path(os.fsencode(path), flags)


def stored_reader(path: Path) -> BinaryIO:
    """A file of `open_stored`, to be read. Raises UnsafeError and OSError."""
    return os.fdopen(open_stored(path, os.O_RDONLY), "rb")


def open_output(path: Path) -> int:
    """A file descriptor to read a worker's output. Raises OSError, also for anything but a regular
    file: it never waits for the other end of a pipe."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def unreadable(path: Path, error: OSError) -> UsageError:
    """The error for a stored file that cannot be opened or read."""
    if isinstance(error, UnsafeError):
        return UsageError(error.reason, hint=error.hint("DTRAIN_HOME"))
    return UsageError(f"{path}: cannot be read: {error.strerror}")


def write_object(
    path: Path, body: Mapping[str, Any], *, indent: int | None = None, durable: bool = False
) -> None:
    """Write, or replace, a file with a JSON object; readers never see half of it. ``durable``: it
    survives a crash of the machine. Raises OSError."""
    import json

    with replaced(path) as file:
        file.write(json.dumps(body, indent=indent).encode())
        if durable:
            file.flush()
            os.fsync(file.fileno())
    if durable:
        # Or the folder may still have the old file after the crash. Some file systems cannot do it.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with suppress(OSError), closing_fd(os.open(path.parent, flags)) as folder:
            os.fsync(folder)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """The new content of a file, to be written. It takes the place of the old one at the end;
    readers never see half of it. Raises OSError."""
    draft = path.with_name(f".{path.name}")
    draft.unlink(missing_ok=True)
    with os.fdopen(open_stored(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        yield file
    draft.replace(path)


def read_object(
    path: Path, schema: int, limit: int, read: Callable[[dict[str, Any]], _T]
) -> _T | None:
    """What ``read`` makes of the JSON object in a file of at most ``limit`` bytes; None if there is
    no such file.

    Raises UsageError if this version cannot read it, also where ``read`` raises ProtocolError.
    """
    from dtrain.messages.decode import ProtocolError, parse_object  # json takes time to import

    try:
        with stored_reader(path) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ProtocolError(f"larger than {limit >> 20} MiB")
        body = parse_object(data)
        if body.get("schema") != schema:
            raise UsageError(f"{path}: written by another version of dtrain")
        return read(body)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    except ProtocolError as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
