"""Finds the snapshots that are in use, and deletes those that are not."""

from __future__ import annotations

import contextlib
import os
import time

from dtrain.node.files import read_file, text_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable

    from dtrain.node.sync.snapshots import Snapshot
    from dtrain.node.sync.store import SnapshotStore


def machine() -> str:
    """An id of this machine and process namespace, within which `used_here` sees all processes.
    Survives a reboot."""
    identity = text_of("/etc/machine-id") or ""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return "%s %s %s" % (os.uname().nodename, identity, namespace)


def used_here(roots: Iterable[bytes]) -> set[bytes]:
    """The ``roots`` that a process on this machine works in, or has in its command line or
    environment."""
    roots = set(roots)
    used: set[bytes] = set()
    try:
        processes = [name for name in os.listdir(b"/proc") if name.isdigit()]
    except OSError:
        return roots
    for process in processes:
        place = b"/proc/%s/" % process
        about = [read_file(place + file) or b"" for file in (b"environ", b"cmdline")]
        with contextlib.suppress(OSError):
            about.append(os.readlink(place + b"cwd"))
        used.update(root for root in roots - used if any(root in what for what in about))
    return used


def unused_here(snapshots: list[Snapshot], grace: float) -> list[Snapshot]:
    """The snapshots that this machine no longer needs: no process uses them, and no launch got
    them in the last ``grace`` seconds, in which it may still start."""
    me, now = machine(), time.time()
    used = used_here(snapshot.path for snapshot in snapshots)
    return [s for s in snapshots if s.path not in used and now - s.users.get(me, 0.0) > grace]


def delete_unused(place: SnapshotStore, idle: list[Snapshot]) -> list[Snapshot]:
    """Give up snapshots for this machine. Returns those deleted: no other machine uses them."""
    deleted = []
    for snapshot in idle:
        if snapshot.users.pop(machine(), None) is not None:
            snapshot.save()
        if not snapshot.users and all(output.settled for output in snapshot.outputs):
            snapshot.delete(place.temporary("trash"))
            deleted.append(snapshot)
    return deleted
