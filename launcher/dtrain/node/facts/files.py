"""The folders and files of the job."""

from __future__ import annotations

import os

from dtrain.node.trust import Trust, UnsafeError

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import Any, Callable

    from dtrain.node.facts.orders import JobOrder

    Json = dict[str, Any]


def expand(path: str) -> str:
    """An absolute path. ``~/`` is the home folder, and relative paths start there."""
    home = os.path.expanduser("~")
    return os.path.normpath(os.path.join("/", home, os.path.expanduser(path)))


def folder_to_run_in(request: JobOrder) -> str:
    """The working folder, or another one if it is not there."""
    workdir = expand(request["workdir"])
    try:
        if request.get("any_owner"):
            os.listdir(workdir)
        else:
            # If this succeeds, no other user can create or replace the folder.
            Trust(request["trust_group"]).check_folder(os.fsencode(workdir))
    except OSError:
        home = os.path.expanduser("~")
        return home if os.access(home, os.X_OK) else "/"
    return workdir


def why_unsafe(request: JobOrder, key: str, check: Callable[[Trust], None]) -> Json | None:
    """Why the folder or file in the setting ``key`` is unsafe, and the remedy. None if it is safe
    or cannot be read, which other facts report."""
    try:
        check(Trust(request["trust_group"]))
    except UnsafeError as error:
        return {"seen": error.reason, "remedy": error.hint(key)}
    except OSError:
        pass
    return None
