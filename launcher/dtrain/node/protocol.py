"""The launcher's side of `dtrain.node.agent.wire`: frames from a relay, commands to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.messages.decode import ProtocolError, excerpt, parse_object
from dtrain.node.agent.wire import DATA, HEADER, MAX_PAYLOAD, MESSAGE, PREAMBLE

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
        self._noise: bytes | None = None
        self._searched = 0
        self._buffer = bytearray()

    @property
    def noise(self) -> bytes:
        """The last bytes before the preamble."""
        return bytes(self._buffer[-KEPT_NOISE:]) if self._noise is None else self._noise

    def feed(self, data: bytes) -> Iterator[Message | Data]:
        """Yield the frames that ``data`` completes.

        Raises ProtocolError for output that no relay writes, and for more than `MAX_NOISE` bytes
        before the preamble.
        """
        self._buffer += data
        if self._noise is None and not self._sync():
            return
        start = 0
        try:
            while len(self._buffer) - start >= HEADER.size:
                kind, stream, offset, length = HEADER.unpack_from(self._buffer, start)
                if kind not in (MESSAGE, DATA) or length > MAX_PAYLOAD:
                    raise ProtocolError(f"unreadable frame (kind {kind}, {length} bytes)")
                end = start + HEADER.size + length
                if len(self._buffer) < end:
                    return
                payload = bytes(self._buffer[start + HEADER.size : end])
                start = end
                yield Data(stream, offset, payload) if kind == DATA else _message(payload)
        finally:
            del self._buffer[:start]

    def _sync(self) -> bool:
        at = self._buffer.find(PREAMBLE, self._searched)
        if at < 0 and len(self._buffer) > MAX_NOISE:
            raise ProtocolError(f"it printed {MAX_NOISE >> 20} MiB without the agent's preamble")
        if at < 0:
            # The preamble may be cut in two.
            self._searched = max(0, len(self._buffer) - len(PREAMBLE) + 1)
            return False
        self._noise = bytes(self._buffer[max(0, at - KEPT_NOISE) : at])
        del self._buffer[: at + len(PREAMBLE)]
        return True


def _message(payload: bytes) -> Message:
    body = parse_object(payload)
    if not isinstance(body.get("type"), str):
        raise ProtocolError(f"a message without a type: {excerpt(payload)}")
    return Message(body)


def encode_command(body: Mapping[str, object]) -> bytes:
    """One command for the relay's stdin."""
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"
