"""File contents as frames for the wire (`dtrain.node.sync.wire`), made once for all hosts.

The contents of the files
that a node asked for follow one another as one stream, cut at file ends and every `CHUNK` bytes;
the node knows all sizes and hashes from the manifest.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from dtrain.node.sync.wire import CHUNK, DEFLATED, FRAME, RAW

_KEPT = 64 << 20
"""Bytes of frames that are kept for the other hosts; bigger trees are read anew for each."""
_PAYS = 0.9
"""Compression must save a tenth, or the node's time is better spent otherwise."""


@dataclass(frozen=True, slots=True)
class File:
    path: str
    size: int
    executable: bool
    mtime_ns: int
    sha256: str
    """Hex digest of its content."""


class SourceChangedError(Exception):
    """A file is not what it was when the launch began. ``path`` is relative to the tree."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Contents:
    """The contents of the files under one folder. Safe to use from many threads."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, bool], bytes] = {}
        self._room = _KEPT

    def frames(self, file: File, *, deflate: bool) -> Iterator[bytes]:
        """Frames with exactly ``file.size`` bytes of its content, in at most `CHUNK` steps.
        ``deflate`` compresses what shrinks by it.

        Raises SourceChangedError if the file is gone or shorter now. Other changes show at the
        node, whose hash differs.
        """
        if file.size > CHUNK:
            yield from self._read(file, deflate)
            return
        # One host compresses, the others wait and take the result.
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
                        # A file is of one kind: what does not shrink at first is not tried again.
                        deflate = len(deflated) < _PAYS * len(chunk)
                    yield frame(DEFLATED, deflated) if deflate else frame(RAW, chunk)
        except OSError:
            raise SourceChangedError(file.path) from None


def local_path(root: bytes, path: str) -> bytes:
    """Where ``path`` of a tree lies on this machine."""
    return os.path.join(root, path.encode("utf-8", "surrogateescape"))


def frame(kind: int, payload: bytes) -> bytes:
    return FRAME.pack(kind, len(payload)) + payload
