"""Facts about folders and file systems."""

from __future__ import annotations

import os

from dtrain.node.facts.files import expand, why_unsafe
from dtrain.node.facts.probing import reason_of
from dtrain.node.files import nearest_folder, text_of, user_name
from dtrain.node.trust import Trust

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder

ESCAPED = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}
"""What the kernel writes in place of some characters of a path, see proc(5)."""


def mounts() -> list[tuple[str, str, str]]:
    """Mount point, type and source of every file system."""
    found = []
    for line in (text_of("/proc/self/mountinfo") or "").splitlines():
        head, _, tail = line.partition(" - ")
        left, right = head.split(), tail.split()
        if len(left) > 4 and len(right) > 1:
            point = left[4]
            for code, char in ESCAPED.items():
                point = point.replace(code, char)
            found.append((point, right[0], right[1]))
    return found


def storage(request: GatherOrder) -> Json:
    """Each folder that the job will use, and its file system."""
    found = {name: folder(path) for name, path in request["folders"].items()}
    table = mounts()  # only now: a look at a folder has an automounter mount it
    for one in found.values():
        one.update(file_system(one["nearest"], table))
    for name, path in request["own_folders"].items():
        found[name]["unsafe"] = unsafe(request, name, path)
    return found


def unsafe(request: GatherOrder, name: str, path: str) -> Json | None:
    """Why a launch would refuse a folder that it creates, or a folder above it. None if it would
    not."""

    def check(trust: Trust) -> None:
        trust.check_folder(os.fsencode(expand(path)), own=1)

    return why_unsafe(request, name, check)


def folder(path: str) -> Json:
    wanted = expand(path)
    there = nearest_folder(wanted)
    status, owner = os.statvfs(there), os.stat(there).st_uid
    return {
        "path": wanted,
        "exists": there == wanted,
        "nearest": there,
        "total": status.f_blocks * status.f_frsize,
        "free": status.f_bavail * status.f_frsize,
        "inodes": status.f_files,
        "inodes_free": status.f_favail,
        "not_writable": why_not_writable(there),
        "stranger": "" if owner in (0, os.geteuid()) else user_name(owner)[:1024],
    }


def file_system(path: str, table: list[tuple[str, str, str]]) -> Json:
    inside = os.path.realpath(path) + "/"
    point, kind, source = max(  # the last one is on top: a file server over its automounter
        (one for one in reversed(table) if inside.startswith(one[0].rstrip("/") + "/")),
        key=lambda one: len(one[0]),
        default=("", "", ""),
    )
    return {"mount": point, "type": kind, "source": source}


def why_not_writable(path: str) -> str:
    """The reason; empty if a test file can be created. A file server may refuse what the
    permissions allow."""
    name = os.path.join(path, ".dtrain-check-%d-%s" % (os.getpid(), os.urandom(4).hex()))
    try:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(name)
    except OSError as error:
        return reason_of(error)
    return ""
