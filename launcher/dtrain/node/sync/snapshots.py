"""Snapshots, and the outputs of jobs in them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import time

from dtrain.node.agent.wire import text
from dtrain.node.sync.wire import CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    from dtrain.node.sync.manifest import Manifest, SentFile
    from dtrain.node.sync.store import SnapshotStore

REHASHED = 64 << 20
"""Bytes up to which a touched file is compared by content before it counts as edited."""


class Output:
    """A file or link in a snapshot that was not sent, or has changed since."""

    def __init__(self, snapshot: Snapshot, path: bytes, status: os.stat_result) -> None:
        self.snapshot = snapshot
        self.path = path
        self.mtime_ns = status.st_mtime_ns
        self.target: bytes | None = None
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(self.where)
            if target.startswith(snapshot.path + b"/"):
                # `latest -> /home/me/gpt.dtrain/7-…/step-100` must outlive its snapshot.
                folder = os.path.dirname(os.path.join(snapshot.path, path))
                target = os.path.relpath(target, folder)
            self.target = target
        self.mark = [text(self.target)] if self.target is not None else [status.st_ino]
        """Equal marks at one path in two snapshots mean the same output."""

    @property
    def where(self) -> bytes:
        return os.path.join(self.snapshot.root, self.path)

    @property
    def signature(self) -> list[Any]:
        """Differs from the signature of a later file at this path, which may reuse the inode."""
        return [*self.mark, self.mtime_ns]

    @property
    def settled(self) -> bool:
        return bool(self.snapshot.settled.get(text(self.path)) == self.signature)

    def show(self, root: bytes) -> None:
        """Make it appear in the snapshot at ``root``."""
        there = os.path.join(root, self.path)
        if self.target is None:
            os.link(self.where, there, follow_symlinks=False)
        else:
            os.symlink(self.target, there)


class Snapshot:
    def __init__(self, place: SnapshotStore, name: bytes, tree: Manifest) -> None:
        self.name = self.root = name
        self.path = os.path.join(place.container, name)
        self.number = int(name.split(b"-")[0])
        self.tree = tree
        self._place = place
        self._state_file = name + b".state.json"
        state = place.read_json(self._state_file) or {}
        users, settled = state.get("users"), state.get("settled")
        self.users: dict[str, float] = {}
        if isinstance(users, dict):
            self.users = {who: t if isinstance(t, float) else 0.0 for who, t in users.items()}
        self.settled: dict[str, list[Any]] = settled if isinstance(settled, dict) else {}
        self.outputs: list[Output] = []
        self.folders: dict[bytes, int] = {}
        self.contents: dict[str, tuple[bytes, tuple[int, int]]] = {}
        """By hash: the path of an unchanged sent file, and its signature."""
        self.pristine = False
        """Whether all sent files are present and unchanged."""

    def examine(self) -> None:
        """Find the unchanged sent files and the outputs."""
        self.outputs, self.folders, self.contents = [], {}, {}
        missing = len(self.tree.files) + len(self.tree.links)
        for path, status in walk(self.root):
            compiled = b"__pycache__" in path.split(b"/")
            if stat.S_ISDIR(status.st_mode):
                if not compiled or path in self.tree.folders:
                    self.folders[path] = stat.S_IMODE(status.st_mode)
                continue
            sent = self.tree.by_path.get(path)
            if sent is not None and self._as_sent(sent, status):
                self.contents[sent.sha256] = (path, signature(status))
                missing -= sent.mode == stat.S_IMODE(status.st_mode)
                continue
            output = Output(self, path, status)
            if output.target is not None and self.tree.links.get(path) == output.target:
                missing -= 1
            elif not compiled:
                self.outputs.append(output)
        self.pristine = not missing and self.folders.keys() >= set(self.tree.folders)

    def _as_sent(self, sent: SentFile, status: os.stat_result) -> bool:
        if not stat.S_ISREG(status.st_mode) or status.st_size != sent.size:
            return False
        if status.st_mtime_ns == sent.mtime_ns:
            return True
        # Only touched, or restored from a backup: it need not be sent again.
        try:
            return sent.size <= REHASHED and (
                sha256(os.path.join(self.root, sent.path)) == sent.sha256
            )
        except OSError:
            return False

    def give(self, machine: str) -> None:
        """Note that ``machine`` is about to run a job in it."""
        self.users[machine] = time.time()
        self.save()

    def save(self) -> None:
        self._place.write_json(self._state_file, {"users": self.users, "settled": self.settled})

    def delete(self, trash: bytes) -> None:
        # Rename first, so that a half-deleted snapshot is never visible.
        os.rename(self.root, trash)
        shutil.rmtree(trash, ignore_errors=True)
        discard(self.root)


def discard(root: bytes) -> None:
    """Remove a complete or partial snapshot, its manifest and its state."""
    shutil.rmtree(root, ignore_errors=True)
    for file in (root + b".json", root + b".state.json"):
        with contextlib.suppress(OSError):
            os.unlink(file)


def walk(root: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    """All folders, files and links below ``root``, a folder before its contents. Skips sockets and
    other special files, and the names under which NFS keeps deleted files that are still open."""
    pending = [b""]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.name.startswith(b".nfs0"):
                continue
            path = os.path.join(folder, entry.name)
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)
            elif not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                continue
            yield path, status


def signature(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def sha256(path: bytes) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()
