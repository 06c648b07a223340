"""Reads small files, most of them in /proc and /sys."""

from __future__ import annotations

import os
import pwd
import re

from dtrain.node.trust import Trust, UnsafeError

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import Any, Callable

    from dtrain.node.facts.orders import JobOrder

    Json = dict[str, Any]


def read(path: str, limit: int = 1 << 20) -> str:
    """A small file as text, without leading and trailing white space. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(limit).decode("utf-8", "backslashreplace").strip()


def text_of(path: str) -> str | None:
    try:
        return read(path)
    except OSError:
        return None


def number(text: str | None) -> int | None:
    """The first number in ``text``."""
    found = re.search(r"-?\d+", text or "")
    return int(found[0]) if found else None


def listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def expand(path: str) -> str:
    """An absolute path. ``~/`` is the home folder, and relative paths start there."""
    home = os.path.expanduser("~")
    return os.path.normpath(os.path.join(home, os.path.expanduser(path)))


def why_unsafe(request: JobOrder, key: str, check: Callable[[Trust], None]) -> Json | None:
    """Why the folder or file in the setting ``key`` is unsafe, and the remedy. None if it is safe
    or cannot be read, which other facts report. Also None if the job's engine does not care."""
    if request.get("any_owner"):
        return None
    try:
        check(Trust(request["trust_group"]))
    except UnsafeError as error:
        return {"seen": error.reason, "remedy": error.hint(key)}
    except OSError:
        pass
    return None


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
