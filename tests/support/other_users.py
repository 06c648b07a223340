"""Other users of a machine: files that they own, and code that runs as one of them.

Tests run as root and use accounts that every Linux has. Each has a private group.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

VICTIM = pwd.getpwnam("daemon")
MALLORY = pwd.getpwnam("bin")


@contextlib.contextmanager
def acting_as(user: pwd.struct_passwd, *groups: int) -> Iterator[None]:
    """Drop this process's rights to those of ``user``, who is also in ``groups``."""
    before = os.getgroups()
    os.setgroups(groups)
    os.setegid(user.pw_gid)
    os.seteuid(user.pw_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


def give(path: Path, user: pwd.struct_passwd, mode: int | None = None) -> Path:
    """Let a path belong to ``user``."""
    os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
    if mode is not None:
        path.chmod(mode)
    return path


def folder_of(user: pwd.struct_passwd, path: Path, mode: int = 0o777) -> Path:
    path.mkdir(parents=True)
    return give(path, user, mode)


def scratch(path: Path) -> Path:
    """A folder like /tmp."""
    path.mkdir()
    path.chmod(0o1777)
    return path
