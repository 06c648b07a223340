"""The launcher's frames on stdin, and the answers to them."""

from __future__ import annotations

import json
import signal
import zlib

from dtrain.node.sync.errors import LauncherGoneError
from dtrain.node.sync.wire import CHUNK, DEFLATED, FRAME, PREAMBLE, RAW, REQUEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from io import BufferedReader
    from typing import Any, BinaryIO


MAX_REQUEST = 1 << 30
IDLE = 100
"""Seconds of silence from the launcher after which it counts as gone: less than another launch
waits for the lock. The connection of a machine that lost its power or its address never ends."""


class Channel:
    """The launcher's frames on stdin, answers as lines of JSON on stdout."""

    def __init__(self, source: BufferedReader, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink

    def greet(self) -> None:
        self._sink.write(PREAMBLE)
        self._sink.flush()

    def answer(self, body: dict[str, Any]) -> None:
        self._sink.write(json.dumps(body).encode() + b"\n")
        self._sink.flush()

    def request(self) -> dict[str, Any]:
        kind, payload = self._frame(MAX_REQUEST)
        if kind != REQUEST:
            raise LauncherGoneError
        request: dict[str, Any] = json.loads(zlib.decompress(payload))
        return request

    def content(self) -> bytes:
        """The next piece of the contents asked for."""
        kind, payload = self._frame(2 * CHUNK)
        if kind == DEFLATED:
            return zlib.decompressobj().decompress(payload, CHUNK)
        if kind == RAW:
            return payload
        raise LauncherGoneError

    def _frame(self, limit: int) -> tuple[int, bytes]:
        try:
            kind, length = FRAME.unpack(self._exactly(FRAME.size))
            if length > limit:
                raise LauncherGoneError
            return kind, self._exactly(length)
        finally:
            signal.alarm(0)

    def _exactly(self, size: int) -> bytes:
        pieces = []
        while size:
            signal.alarm(IDLE)  # for each piece: a network may be slow
            piece = self._source.read1(size)
            if not piece:
                raise LauncherGoneError
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)
