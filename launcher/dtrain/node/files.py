"""Reads small files, most of them in /proc and /sys, closes files, and finds programs."""

from __future__ import annotations

import contextlib
import os
import pwd
import re

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import AnyStr


def read_file(path: str | bytes, limit: int = 1 << 22) -> bytes | None:
    """Up to ``limit`` bytes of a file, or None if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    parts = []
    try:
        while limit > 0:
            part = os.read(fd, min(limit, 1 << 16))
            if not part:
                break
            parts.append(part)
            limit -= len(part)
    except OSError:
        return None
    finally:
        os.close(fd)
    return b"".join(parts)


def close_others(*keep: int) -> None:
    """Close all descriptors of this process but those in ``keep``."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in keep:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(fd)


def text_of(path: str, limit: int = 1 << 22) -> str | None:
    """A file as text, without leading and trailing white space; None if it cannot be read."""
    data = read_file(path, limit)
    return None if data is None else data.decode("utf-8", "backslashreplace").strip()


def number(text: str | None) -> int | None:
    """The first number in ``text``."""
    found = re.search(r"-?\d+", text or "")
    return int(found[0]) if found else None


def listed(path: AnyStr) -> list[AnyStr]:
    """The sorted names in a folder; empty if it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def nearest_folder(path: AnyStr) -> AnyStr:
    """The lowest folder on the way to an absolute path that is there."""
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def numbered(folder: str, prefix: str) -> list[int]:
    """The numbers of the entries that are named ``prefix`` and a number."""
    names = (name[len(prefix) :] for name in listed(folder) if name.startswith(prefix))
    return [int(number) for number in names if number.isdecimal()]


def executable(path: str | bytes) -> bool:
    """Whether this user may run the program at ``path``."""
    return os.path.isfile(path) and os.access(path, os.X_OK)


def find_program(name: str) -> str | None:
    """The path of a program on PATH or in the folders that vendors use."""
    folders = os.environ.get("PATH", os.defpath).split(":")
    folders += ["/usr/bin", "/usr/local/bin", "/usr/sbin", "/usr/lib/wsl/lib", "/opt/rocm/bin"]
    paths = (os.path.join(folder, name) for folder in folders if folder.startswith("/"))
    return next(filter(executable, paths), None)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
