"""File contents as frames for the wire (`dtrain.node.sync.wire`), created once for all hosts.

The contents of the files that a node requested form one stream, cut at file ends and every `CHUNK`
bytes. The node knows all sizes and hashes from the manifest.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator

from dtrain.node.agent.wire import raw
from dtrain.node.sync.wire import CHUNK, DEFLATED, FRAME, RAW
from dtrain.records import dataclass

_KEPT = 64 << 20
"""Bytes of frames to cache for the other hosts. Larger trees are read again for each host."""
_PAYS = 0.9
"""Largest compressed share that is worth the node's time to decompress."""


@dataclass(frozen=True, slots=True)
class File:
    path: str
    size: int
    executable: bool
    mtime_ns: int
    sha256: str
    """Hex digest of the content."""


class SourceChangedError(Exception):
    """A file has changed since the launch began. ``path`` is relative to the tree."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Contents:
    """The contents of the files under one folder. Thread-safe."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, bool], bytes] = {}
        self._room = _KEPT

    def frames(self, file: File, *, deflate: bool) -> Iterator[bytes]:
        """Frames with exactly ``file.size`` bytes of content, at most `CHUNK` bytes each.
        ``deflate`` compresses content that shrinks.

        Raises SourceChangedError if the file is missing or shorter now. The node detects other
        changes by the hash.
        """
        if file.size > CHUNK:
            yield from self._read(file, deflate)
            return
        # One thread compresses. The others wait and use the result.
        with self._lock:
            framed = self._kept.get((file.sha256, deflate))
            if framed is None:
                framed = b"".join(self._read(file, deflate))
                if len(framed) <= self._room:
                    self._room -= len(framed)
                    self._kept[file.sha256, deflate] = framed
        yield framed

    def _read(self, file: File, deflate: bool) -> Iterator[bytes]:
        left = file.size
        try:
            with open(local_path(self._root, file.path), "rb", buffering=0) as content:
                while left:
                    chunk = content.read(min(left, CHUNK))
                    if not chunk:
                        raise SourceChangedError(file.path)
                    left -= len(chunk)
                    if deflate:
                        deflated = zlib.compress(chunk, 1)
                        # A file is uniform: if one chunk does not shrink, send the rest as it is.
                        deflate = len(deflated) < _PAYS * len(chunk)
                    yield frame(DEFLATED, deflated) if deflate else frame(RAW, chunk)
        except OSError:
            raise SourceChangedError(file.path) from None


def local_path(root: bytes, path: str) -> bytes:
    """The local path of ``path`` in a tree."""
    return os.path.join(root, raw(path))


def frame(kind: int, payload: bytes) -> bytes:
    return FRAME.pack(kind, len(payload)) + payload
