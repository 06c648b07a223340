"""The folder of a run on this host."""

from __future__ import annotations

import contextlib
import errno
import os

from dtrain.node.agent.wire import RefusedError, raw, shown, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.wire import Json

RESERVED = 64 << 10
"""Bytes set aside for events, so that a full disk does not silence the supervisor."""
LEAST_FREE = 16 << 20
"""Bytes that must be free for a launch to begin."""


def expand(path: str, base: bytes | None = None) -> bytes:
    """An absolute path: `~` is the home folder, and so is what a relative path starts from."""
    home = os.environb.get(b"HOME") or os.fsencode(os.path.expanduser("~"))
    if path == "~" or path.startswith("~/"):
        path_bytes = home + raw(path[1:])
    else:
        path_bytes = os.path.join(base or home, raw(path))
    return os.path.normpath(path_bytes)


def folder_of(command: Json) -> bytes:
    for word in (command["run"], command["host"]):
        if word in ("", ".", "..") or "/" in word or "\0" in word:
            raise RefusedError("agent", "%r cannot be the name of a run or host" % word)
    run_dir = expand(command["run_dir"])
    return os.path.join(run_dir, b"nodes", raw(command["run"]), raw(command["host"]))


def cannot_write(error: OSError, folder: bytes) -> RefusedError:
    """What to tell about a folder or file that could not be made."""
    where = shown(folder)
    hint = "point `cluster.run_dir` at a folder on this host that you can write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        parent = folder
        while not os.path.isdir(parent):
            parent = os.path.dirname(parent)
        disk = os.statvfs(parent)
        quota = "your quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        return RefusedError(
            "disk",
            "%s: %s (%d bytes free)" % (where, quota, disk.f_bavail * disk.f_frsize),
            "free some space, or point `cluster.run_dir` at another disk",
        )
    if error.errno == errno.EROFS:
        return RefusedError("permission", "%s: the file system is read-only" % where, hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return RefusedError("permission", "%s: permission denied" % where, hint)
    return RefusedError("permission", "%s: %s" % (where, os.strerror(error.errno or 0)), hint)


def make_folder(folder: bytes) -> list[bytes]:
    """Make the run's folder, for its owner alone. Every folder that had to be made, outermost
    first."""
    made: list[bytes] = []
    try:
        missing = [folder]
        while missing:
            try:
                os.mkdir(missing[-1], 0o700)
            except FileNotFoundError:
                missing.append(os.path.dirname(missing[-1]))
            except FileExistsError:
                if missing[-1] == folder or not os.path.isdir(missing[-1]):
                    raise
                missing.pop()
            else:
                os.chmod(missing[-1], 0o700)
                made.append(missing.pop())
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if free < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except FileExistsError as error:
        discard(None, made)
        if error.filename == folder:
            raise RefusedError(
                "agent",
                "%s: a run of this name has already been launched here" % shown(folder),
                "every launch needs a name of its own",
            ) from None
        raise cannot_write(OSError(errno.ENOTDIR, ""), error.filename) from None
    except OSError as error:
        refusal = cannot_write(error, folder)
        discard(folder if folder in made else None, made)
        raise refusal from None
    return made


def discard(folder: bytes | None, made: list[bytes]) -> None:
    """Remove the folder of a run that never started, and the folders made for it if empty."""
    if folder is not None:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
        run = os.path.dirname(folder)
        made = [*made, os.path.dirname(run), run, folder]
    for path in reversed(made):
        with contextlib.suppress(OSError):  # another run's folder is in it
            os.rmdir(path)


def create(path: bytes, flags: int = 0) -> int:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    os.fchmod(fd, 0o600)
    return fd


def save(path: bytes, data: bytes) -> None:
    fd = create(path)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def listed(path: bytes) -> list[bytes]:
    try:
        return os.listdir(path)
    except OSError:
        return []
