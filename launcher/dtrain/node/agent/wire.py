"""What passes between a relay and a launcher, and the text in it."""

from __future__ import annotations

import json
import os
import select
import struct

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

# Held equal to dtrain/node/protocol.py by a test.
VERSION = 1
PREAMBLE = b"\x00dtrain-relay-1\n"
HEADER = struct.Struct(">BIQI")
MESSAGE, DATA = 1, 2
MAX_PAYLOAD = 1 << 20
CHUNK = 512 << 10
"""Bytes of one stream sent before the next one has its turn."""
MAX_TRACEBACK = 16 << 10


class RefusedError(Exception):
    """The job cannot start on this host."""

    def __init__(self, what: str, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.message = {"type": "refused", "what": what, "reason": reason, "hint": hint}


def raw(text: str) -> bytes:
    """The bytes that ``text`` stands for, whatever this host's locale."""
    return text.encode("utf-8", "surrogateescape")


def shown(data: bytes) -> str:
    """``data`` for a message to a person."""
    return data.decode("utf-8", "backslashreplace")


def encode(body: Json) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
