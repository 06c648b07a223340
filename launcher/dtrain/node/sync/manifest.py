"""The files, links and folders that the launcher sent for one snapshot."""

from __future__ import annotations

import os

from dtrain.node.agent.wire import raw, text
from dtrain.node.sync.errors import SyncRefusedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class SentFile:
    """One file of the launcher's tree."""

    __slots__ = ("executable", "mode", "mtime_ns", "path", "sha256", "size")

    def __init__(self, row: list[Any]) -> None:
        self.path = raw(row[0])
        self.size = int(row[1])
        self.executable = bool(row[2])
        self.sha256 = str(row[3])
        self.mtime_ns = int(row[4])
        # Only in a manifest on the node: the mode on its file system.
        self.mode = int(row[5]) if len(row) > 5 else None

    def row(self) -> list[Any]:
        content = [text(self.path), self.size, self.executable, self.sha256]
        return [*content, self.mtime_ns, self.mode]


class Manifest:
    """The sent contents of a snapshot.

    Raises SyncRefusedError for a path that leads outside.
    """

    def __init__(self, body: dict[str, Any]) -> None:
        self.digest = str(body["digest"])
        self.folders = [raw(path) for path in body["folders"]]
        self.links = {raw(path): raw(target) for path, target in body["links"]}
        self.files = [SentFile(row) for row in body["files"]]
        self.by_path = {file.path: file for file in self.files}
        self._check()

    def manifest(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "folders": [text(path) for path in self.folders],
            "links": [[text(path), text(target)] for path, target in self.links.items()],
            "files": [file.row() for file in self.files],
        }

    def _check(self) -> None:
        known: set[bytes] = {b""}
        names = [*self.folders, *self.links, *(file.path for file in self.files)]
        for at, path in enumerate(names):
            safe = all(part not in (b"", b".", b"..") for part in path.split(b"/"))
            # Each parent is a folder of the tree, so no file is written through a link.
            if not safe or b"\0" in path or path in known or os.path.dirname(path) not in known:
                raise SyncRefusedError("the launcher sent an unsafe path: %r" % path)
            if at < len(self.folders):
                known.add(path)
        if len(set(names)) != len(names):
            raise SyncRefusedError("the launcher sent a path twice")
        for path, target in self.links.items():
            lexical = os.path.normpath(os.path.join(os.path.dirname(path), target))
            if target.startswith(b"/") or lexical == b".." or lexical.startswith(b"../"):
                raise SyncRefusedError("the launcher sent a link that leads outside: %r" % path)
