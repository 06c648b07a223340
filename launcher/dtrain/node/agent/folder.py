"""The folder of a run on this host."""

from __future__ import annotations

import contextlib
import errno
import os

from dtrain.node.agent.wire import RefusedError, raw, shown, write_all
from dtrain.node.descriptors import closing_fd
from dtrain.node.files import nearest_folder
from dtrain.node.trust import Trust, UnsafeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.agent.commands import RunRequest

RESERVED = 64 << 10
"""Bytes reserved for events, so that the supervisor can write them on a full disk."""
LEAST_FREE = 16 << 20
"""Free bytes that a launch needs."""


def expand(path: str, base: bytes | None = None) -> bytes:
    """An absolute path. ``~`` is the home folder, and ``~name`` that of another user, if there is
    one. A relative path starts at ``base``, or at the home folder if there is no ``base``."""
    written, home = raw(path), os.path.expanduser(b"~")
    expanded = os.path.expanduser(written)
    start = base or home if expanded == written else b""
    return os.path.normpath(os.path.join(b"/", start, expanded))  # HOME may be relative


def folder_of(command: RunRequest) -> bytes:
    for word in (command["run"], command["host"]):
        if word in ("", ".", "..") or "/" in word or "\0" in word:
            raise RefusedError("agent", "%r is not a valid name of a run or host" % word)
    run_dir = expand(command["run_dir"])
    return os.path.join(run_dir, b"nodes", raw(command["run"]), raw(command["host"]))


def trust_of(command: RunRequest) -> Trust:
    """The users that a command trusts. Raises RefusedError."""
    try:
        return Trust(command["trust_group"])
    except UnsafeError as error:
        raise RefusedError("permission", error.reason, error.hint("group")) from None


def check_workdir(
    trust: Trust, workdir: bytes, script: str | None, *, complete: bool = True
) -> None:
    """Raises RefusedError if another user can change the code that the workers run. The script may
    be missing unless the folder is ``complete``."""
    key = "`job.workdir`"
    try:
        trust.check_folder(workdir)
        key = "`job.script`"
        if script is not None:
            try:
                trust.check_script(os.path.join(workdir, raw(script)))
            except FileNotFoundError:
                if complete:
                    raise
    except UnsafeError as error:
        raise RefusedError("workdir", error.reason, error.hint(key)) from None
    except OSError as error:
        raise RefusedError("workdir", "%s: %s" % (shown(workdir), error.strerror)) from None


def open_run(trust: Trust, folder: bytes) -> int:
    """The folder of a run on this host. Raises OSError."""
    return trust.open_folder(folder, own=3)[0]


def cannot_write(error: OSError, folder: bytes) -> RefusedError:
    """The refusal for a folder or file that cannot be created."""
    if isinstance(error, UnsafeError):
        return RefusedError("permission", error.reason, error.hint("`cluster.run_dir`"))
    # A walk names the folder or file at which it has failed.
    where = shown(error.filename if isinstance(error.filename, bytes) else folder)
    hint = "point `cluster.run_dir` at a folder on this host that you can write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        disk = os.statvfs(nearest_folder(folder))
        quota = "your quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        free = "%d KiB free, and a launch needs %d" % (
            disk.f_bavail * disk.f_frsize >> 10,
            LEAST_FREE >> 10,
        )
        if disk.f_files and not disk.f_favail:
            free = "no inode free"
        return RefusedError(
            "disk",
            "%s: %s (%s)" % (where, quota, free),
            "free some space, or point `cluster.run_dir` at another disk",
        )
    if error.errno == errno.EROFS:
        return RefusedError("permission", "%s: the file system is read-only" % where, hint)
    if error.errno in (errno.EACCES, errno.EPERM):
        return RefusedError("permission", "%s: permission denied" % where, hint)
    return RefusedError("permission", "%s: %s" % (where, os.strerror(error.errno or 0)), hint)


def make_folder(trust: Trust, folder: bytes) -> tuple[int, list[bytes]]:
    """Create the run's folder with access for its owner only. Returns the open folder and all
    folders created, outermost first. Raises RefusedError."""
    created: list[bytes] = []
    nodes = os.path.dirname(os.path.dirname(folder))
    fd = -1
    try:
        os.close(trust.open_folder(nodes, own=1, created=created, private=False)[0])
        before = len(created)
        fd, path = trust.open_folder(folder, own=3, created=created)
        if path not in created[before:]:
            raise FileExistsError(errno.EEXIST, "", folder)
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        refusal = cannot_write(error, folder)
        if fd >= 0:
            os.close(fd)
        discard(None, created)
        if isinstance(error, FileExistsError):
            raise RefusedError(
                "agent",
                "%s: a run of this name has already been launched here" % shown(folder),
                "choose a new name for each launch",
            ) from None
        raise refusal from None
    return fd, created


def discard(folder: bytes | None, created: list[bytes]) -> None:
    """Remove the folder of a run that never started, and the folders created for it if empty."""
    if folder is not None:
        import shutil  # slow to import, and rarely needed

        # Setup lines may have made folders in it. A link in it is removed, not followed.
        shutil.rmtree(folder, ignore_errors=True)
        run = os.path.dirname(folder)
        created = [*created, os.path.dirname(run), run, folder]
    for path in reversed(created):
        with contextlib.suppress(OSError):  # another run's folder is in it
            os.rmdir(path)


def create(name: bytes, folder: int, flags: int = 0) -> int:
    """Create a file in an open folder. Raises OSError if it exists."""
    flags |= os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    os.fchmod(fd, 0o600)
    return fd


def save(name: bytes, folder: int, data: bytes) -> None:
    with closing_fd(create(name, folder)) as fd:
        write_all(fd, data)
