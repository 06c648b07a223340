"""The launcher's side of `dtrain.node.agent.wire`: frames from a relay, commands to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.messages.decode import ProtocolError, excerpt, parse_object
from dtrain.node.agent.wire import DATA, HEADER, MAX_PAYLOAD, MESSAGE, PREAMBLE
from dtrain.records import dataclass

MAX_NOISE = 1 << 20
"""Bytes that may come before the preamble."""
KEPT_NOISE = 1 << 16


@dataclass(frozen=True, slots=True)
class Message:
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Data:
    stream: int
    offset: int
    payload: bytes


class FrameDecoder:
    """Decodes frames from the relay's stdout, which arrives in pieces of any size."""

    def __init__(self) -> None:
        self._before = bytearray()
        """What came before the preamble, and then the last of it."""
        self._searched = 0
        self.synced = False
        """Whether the preamble has come."""
        # Pieces are joined once the frame is complete: a large one comes in many.
        self._pieces: list[bytes] = []
        self._missing = HEADER.size

    @property
    def noise(self) -> bytes:
        """The last bytes before the preamble."""
        return bytes(self._before[-KEPT_NOISE:])

    def feed(self, data: bytes) -> Iterator[Message | Data]:
        """Yield the frames that ``data`` completes.

        Raises ProtocolError for output that no relay writes, and for more than `MAX_NOISE` bytes
        before the preamble.
        """
        if not self.synced:
            data = self._sync(data)
        self._pieces.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        data, start, end = b"".join(self._pieces), 0, HEADER.size
        try:
            while len(data) >= end:
                kind, stream, offset, length = HEADER.unpack_from(data, start)
                if kind not in (MESSAGE, DATA) or length > MAX_PAYLOAD:
                    raise ProtocolError(f"unreadable frame (kind {kind}, {length} bytes)")
                body = start + HEADER.size
                end = body + length
                if len(data) < end:
                    return
                payload = data[body:end]
                start, end = end, end + HEADER.size
                yield Data(stream, offset, payload) if kind == DATA else _message(payload)
        finally:
            self._pieces = [data[start:]]
            self._missing = end - len(data)

    def _sync(self, data: bytes) -> bytes:
        """What follows the preamble in ``data``."""
        self._before += data
        at = self._before.find(PREAMBLE, self._searched)
        if at < 0 and len(self._before) > MAX_NOISE:
            raise ProtocolError(f"it printed {MAX_NOISE >> 20} MiB without the agent's preamble")
        if at < 0:
            # The preamble may be cut in two.
            self._searched = max(0, len(self._before) - len(PREAMBLE) + 1)
            return b""
        rest = bytes(self._before[at + len(PREAMBLE) :])
        del self._before[at:]
        del self._before[:-KEPT_NOISE]
        self.synced = True
        return rest


def _message(payload: bytes) -> Message:
    body = parse_object(payload)
    if not isinstance(body.get("type"), str):
        raise ProtocolError(f"a message without a type: {excerpt(payload)}")
    return Message(body)


def encode_command(body: Mapping[str, object]) -> bytes:
    """One command for the relay's stdin."""
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"
