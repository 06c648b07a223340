"""Reasons why a sync fails."""

from __future__ import annotations

import contextlib
import errno
import os

from dtrain.node.files import nearest_folder
from dtrain.node.trust import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator


class SyncRefusedError(Exception):
    """The sync fails; the reason and the hint are for the user."""

    def __init__(self, reason: str, hint: str = "", **more: Any) -> None:
        super().__init__(reason)
        self.reply = dict({"type": "refused", "reason": reason, "hint": hint}, **more)


class LauncherGoneError(Exception):
    """The launcher has disconnected or given up."""


def check_free_space(folder: bytes, needed: int) -> None:
    """Raises SyncRefusedError if ``needed`` bytes do not fit."""
    disk = os.statvfs(folder)
    if needed > disk.f_bavail * disk.f_frsize:
        raise no_space(folder, needed)


def no_space(folder: bytes, needed: int | None = None) -> SyncRefusedError:
    disk = os.statvfs(folder)
    free = "%.1f MiB free" % (disk.f_bavail * disk.f_frsize / 2**20)
    if needed is not None:
        free += ", %.1f MiB needed" % (needed / 2**20)
    elif disk.f_files and not disk.f_favail:
        free = "no inode free"
    return SyncRefusedError(
        "no space left in %s (%s)" % (printable(folder), free),
        "free some there, add what the job does not need to job.sync.exclude, "
        "or choose a job.workdir on another disk",
    )


@contextlib.contextmanager
def full_disk_explained(folder: bytes) -> Iterator[None]:
    """Report the free space at the time the disk is full, not after the cleanup."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise no_space(folder) from None


def explain(error: OSError, workdir: bytes) -> SyncRefusedError:
    """A system error as a refusal for the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        folder = os.path.join(os.path.expanduser(b"~"), os.path.expanduser(workdir))
        return no_space(os.path.realpath(nearest_folder(folder)))
    where = workdir if error.filename is None else error.filename
    where = os.path.abspath(where if isinstance(where, bytes) else os.fsencode(str(where)))
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    hint = "choose a job.workdir that you may write to" if denied else "look at job.workdir"
    return SyncRefusedError("%s: %s" % (printable(where), error.strerror or error), hint)
