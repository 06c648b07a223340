"""The protocol between the launcher and a node's relay.

The launcher writes lines of JSON (commands) to the relay's stdin; the relay writes frames to its
stdout. A frame is a header and a payload:

    kind    u8    MESSAGE or DATA
    stream  u32   which stream the payload belongs to; 0 for messages
    offset  u64   the payload's first byte in that stream; 0 for messages
    length  u32   bytes of payload

A MESSAGE is one JSON object with a ``type``; DATA is raw bytes of a worker's output file.
Before the first frame the relay writes ``PREAMBLE``. Output of a login shell before it is noise,
kept to explain a failed start.

`dtrain.node.agent.commands` has the commands, `dtrain.messages.agent` the messages and the events.

Shipped to nodes, and the launcher imports it too: Python 3.8, standard library only.
"""

from __future__ import annotations

import json
import os
import select
import struct

TYPE_CHECKING = False  # importing typing would cost as much as importing json
if TYPE_CHECKING:
    from typing import Any, Mapping

    Json = dict[str, Any]

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
    """The bytes of ``text``, independent of this host's locale."""
    return text.encode("utf-8", "surrogateescape")


def text(data: bytes) -> str:
    """The text whose bytes `raw` gives."""
    return data.decode("utf-8", "surrogateescape")


def shown(data: bytes) -> str:
    """``data`` as text for a message."""
    return data.decode("utf-8", "backslashreplace")


def encode(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def frame(
    payload: bytes, kind: int = MESSAGE, stream: int = 0, offset: int = 0
) -> tuple[bytes, bytes]:
    """A header and its payload. Joining them would copy a large one."""
    return HEADER.pack(kind, stream, offset, len(payload)), payload


def write_all(fd: int, *parts: bytes) -> None:
    """Write ``parts`` one after the other."""
    views = [memoryview(part) for part in parts]
    while views:
        try:
            written = os.writev(fd, views)
        except BlockingIOError:
            select.select([], [fd], [])
            continue
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]
