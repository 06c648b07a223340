"""The lines of an answer of the API server without an end: a log, or a watch."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Mapping
from typing import Any

from dtrain.diagnostics import ConnectError
from dtrain.engines.kubernetes.routines import Pause, Readable, Routine
from dtrain.messages.decode import excerpt

MAX_LINE = 1 << 20
"""Bytes of one event of a watch, or of one line of a log; what comes after them is cut off."""
QUIET_SECONDS = 330.0
"""Seconds without a byte after which a stream ends. Its connection may be broken, or a worker is
quiet."""
_CHUNK = 1 << 16
_READS = 8
"""Chunks that are read before other streams have their turn."""
_MAX_HEAD = 1 << 10
"""Bytes of the line before a chunk."""
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")


class QuietError(ConnectError):
    """The server has sent nothing for a long time."""


class Body:
    """Finds the body in the bytes of an HTTP answer (RFC 9112, section 6)."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
        length = headers.get("Content-Length", "")
        known = re.fullmatch("[0-9]{1,18}", length)
        self._left = 0 if self._chunked else int(length) if known else None
        """Bytes until the end of the body, or of the chunk; None: it ends with its connection."""
        self._head = b""
        """The first bytes of the line before a chunk."""
        self.ended = self._left == 0 and not self._chunked

    @property
    def may_end(self) -> bool:
        """Whether the connection may end here."""
        return self.ended or self._left is None

    def feed(self, data: bytes) -> bytes:
        """The part of the body in ``data``. Raises ValueError."""
        if self._left is None:
            return data
        data, self._head = self._head + data, b""
        parts, start = [], 0
        while start < len(data) and not self.ended:
            if self._left:
                parts.append(data[start : start + self._left])
                start += len(parts[-1])
                self._left -= len(parts[-1])
                self.ended = not (self._left or self._chunked)
                continue
            end = data.find(b"\n", start) + 1
            if not end:
                self._head = data[start : start + _MAX_HEAD]
                break
            # An empty line ends the chunk before.
            if size := data[start:end].partition(b";")[0].strip():
                if not _SIZE.fullmatch(size):
                    raise ValueError(f"no size of a chunk: {size[:20]!r}")
                self._left = int(size, 16)
                self.ended = self._left == 0
            start = end
        return b"".join(parts)


class LineStream:
    def __init__(self, host: str, attempted: str, answer: Any) -> None:
        """``answer``: of urllib3, before its body is read."""
        self._host, self._attempted = host, attempted
        self._answer = answer
        self._body = Body(answer.headers)
        self._rest = self._first = b""
        """Of a line; and what came with the headers."""
        self._drained = False
        """Whether nothing was left to read. TLS may have decrypted more than the headers."""
        self._closed = False
        """Whether the connection has ended."""
        if not self._body.ended:
            # urllib3 can only wait for data.
            reader = answer._fp.fp
            self._connection = reader.raw._sock
            self._connection.settimeout(0)
            with contextlib.suppress(OSError):  # nothing has come
                self._first = reader.peek()

    def close(self) -> None:
        self._answer.close()

    def read(self) -> Routine[list[bytes]]:
        """The next lines, each with its newline. The last one of the stream has none if it is
        incomplete. None at the end. Raises ConnectError if the connection breaks."""
        while not self._body.ended:
            if not self._first:
                yield from self._wait()
            try:
                part = self._body.feed(self._first or self._receive())
            except (OSError, ValueError) as error:
                raise self._broken(error) from None
            self._first = b""
            *lines, rest = (self._rest + part).split(b"\n")
            self._rest = rest[:MAX_LINE]
            if lines:
                return [line + b"\n" for line in lines]
            if self._closed and not self._body.ended:
                if not self._body.may_end:
                    raise self._broken("the connection has ended")
                break
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def _wait(self) -> Routine[None]:
        if not self._drained:
            yield Pause(0)
        elif not (yield Readable(self._connection, QUIET_SECONDS)):
            raise QuietError(self._host, self._attempted, f"nothing for {QUIET_SECONDS:.0f} s")

    def _receive(self) -> bytes:
        """What has arrived. Raises OSError."""
        self._drained = False
        parts = []
        for _ in range(_READS):
            try:
                data = self._connection.recv(_CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._drained = True
                break
            if not data:
                self._closed = True
                break
            parts.append(data)
        return b"".join(parts)

    def _broken(self, why: Exception | str) -> ConnectError:
        return ConnectError(self._host, self._attempted, excerpt(" ".join(str(why).split())))
