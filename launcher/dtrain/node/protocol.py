"""The launcher's side of `dtrain.node.agent.wire`: frames from a relay, commands to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dtrain.messages.decode import ProtocolError, excerpt, parse_object
from dtrain.messages.pieces import KEPT, Pieces
from dtrain.node.agent.wire import DATA, HEADER, MAX_PAYLOAD, MESSAGE, PREAMBLE, encode
from dtrain.records import dataclass


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
        self._start = Pieces()
        self._noise: bytes | None = None
        # Pieces are joined once the frame is complete: a large one comes in many.
        self._pieces: list[bytes] = []
        self._missing = HEADER.size

    @property
    def synced(self) -> bool:
        """Whether the preamble has come."""
        return self._noise is not None

    @property
    def noise(self) -> bytes:
        """The last bytes before the preamble."""
        return self._start.end if self._noise is None else self._noise

    def feed(self, data: bytes) -> Iterator[Message | Data]:
        """Yield the frames that ``data`` completes.

        Raises ProtocolError for output that no relay writes, and without a preamble.
        """
        if self._noise is None:
            self._start.add(data)
            noise = self._start.preamble(PREAMBLE)
            if noise is None:
                return
            self._noise, data = noise[-KEPT:], self._start.rest()
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


def _message(payload: bytes) -> Message:
    body = parse_object(payload)
    if not isinstance(body.get("type"), str):
        raise ProtocolError(f"a message without a type: {excerpt(payload)}")
    return Message(body)


def encode_command(body: Mapping[str, object]) -> bytes:
    """One command for the relay's stdin."""
    return encode(body) + b"\n"
