"""The launcher's frames on stdin, and the answers to them."""

from __future__ import annotations

import json
import signal
import zlib

from dtrain.node.sync.errors import LauncherGoneError
from dtrain.node.sync.wire import CHUNK, DEFLATED, FRAME, PREAMBLE, RAW, REQUEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO


MAX_REQUEST = 1 << 30
IDLE = 300
"""Seconds of silence from the launcher after which it counts as gone, so that the lock frees."""


class Channel:
    """The launcher's frames on stdin, answers as lines of JSON on stdout."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
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
        signal.alarm(IDLE)
        kind, length = FRAME.unpack(self._exactly(FRAME.size))
        if length > limit:
            raise LauncherGoneError
        payload = self._exactly(length)
        signal.alarm(0)
        return kind, payload

    def _exactly(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) < size:
            raise LauncherGoneError
        return data
