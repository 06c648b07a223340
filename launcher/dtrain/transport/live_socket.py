"""A socket that detects a dead peer.

paramiko's own keepalive does not detect one: it requests no reply, every write postpones it (a
launcher that pings each host postpones it forever), and a thread that blocks in a write waits
without limit. TCP cannot detect a dead sshd on a live kernel, or a broken connection behind a
jump host or a ProxyCommand. So every connection records here when it last received bytes. After
a silent interval it sends a keepalive request, which every SSH server must answer. If no bytes
follow, all reads and writes fail. The reading thread and blocked writers both check this, so it
does not matter which of them waits.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, cast

import paramiko

from dtrain.transport.threads import blocking

LEAST_READ, MOST_READ = 1 << 14, 1 << 18
"""Bytes that a thread reserves while it waits for data: few, unless much arrives."""
POLL = 1.0
"""Seconds between checks of a silent connection. paramiko's own 0.1 s would cost a launcher with
hundreds of idle hosts a large part of a core."""
STOOD_STILL = 3
"""If a check comes later than after this many times the usual pause, this process did not run
(Ctrl-Z, a suspended machine)."""


class ByteStream(Protocol):
    """What a connection runs over: a TCP socket, a paramiko channel, or a ProxyCommand's socket."""

    def send(self, data: bytes, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


class LiveSocket:
    """Wraps ``stream`` for paramiko's Transport. `watch` starts the checks."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        direct = isinstance(stream, socket.socket) and stream.family != socket.AF_UNIX
        self.tcp = cast(socket.socket, stream) if direct else None
        """The stream, if it is a TCP connection to the server itself."""
        self._buffer = memoryview(b"")
        self._read_size = LEAST_READ
        self._heard = self._looked = time.monotonic()
        self._asked = self._heard
        self._poll = POLL
        self._interval = 0.0
        self._limit = 0.0
        self._ask: Callable[[], None] | None = None
        self._closed = False
        self.greeting = b""
        """The first bytes received. A server that rejects a client may give the reason there."""
        self.silence = ""
        """Why the connection was closed as dead; empty while it is not."""

    def watch(self, interval: float, count: int, ask: Callable[[], None]) -> None:
        """From now on call ``ask`` after each ``interval`` seconds of silence, and fail after
        ``count`` such intervals in a row."""
        self._heard = self._asked = self._looked = time.monotonic()
        self._interval, self._limit, self._ask = interval, interval * count, ask
        self.settimeout(POLL)

    def send(self, data: bytes) -> int:
        try:
            return self._stream.send(data)
        except TimeoutError:
            self._check()
            raise

    def recv(self, size: int) -> bytes:
        if not self._buffer:
            try:
                data = self._stream.recv(self._read_size)
            except TimeoutError:
                self._check()
                self._ask_if_due()
                raise
            self._heard = self._looked = time.monotonic()
            self._acknowledge()
            if len(data) == self._read_size:
                self._read_size = min(4 * self._read_size, MOST_READ)
            elif 4 * len(data) < self._read_size:
                self._read_size = max(self._read_size // 4, LEAST_READ)
            if len(self.greeting) < 256:
                self.greeting += data[:256]
            # paramiko reads the first block of a packet, then the rest. Without this buffer each
            # packet costs two system calls, or two copies of a channel's whole buffer.
            self._buffer = memoryview(data)
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        return bytes(piece)

    def _acknowledge(self) -> None:
        """Acknowledge what has arrived at once. An sshd that has sent a small packet holds the next
        one back until then, and Linux would wait 40 ms: each new connection would take that much
        longer."""
        if self.tcp is not None and hasattr(socket, "TCP_QUICKACK"):  # not on macOS
            with suppress(OSError):  # closed in the meantime: the next call reports it
                self.tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def settimeout(self, seconds: float | None) -> None:
        """paramiko requests 0.1 s. `close` wakes a reader here, so longer timeouts are enough."""
        self._poll = min(POLL, self._interval / 2) if self._interval else POLL
        self._stream.settimeout(self._poll)

    def close(self) -> None:
        self._closed = True
        if isinstance(self._stream, socket.socket):
            # close() does not wake a thread that sleeps in recv; shutdown() does.
            with suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)
        if isinstance(self._stream, paramiko.Channel):
            # It sends its close over the jump host's connection. If that is dead, it may block.
            blocking.run(self._close_stream)
        else:
            self._close_stream()

    def _close_stream(self) -> None:
        with suppress(Exception):  # the jump host's connection may be broken already
            self._stream.close()

    def _check(self) -> None:
        now = time.monotonic()
        if now - self._looked > STOOD_STILL * self._poll:
            # Nobody listened, so of this time only one pause counts as silence of the peer.
            # The reader and a blocked writer may both get here.
            self._heard = min(now, self._heard + now - self._looked - self._poll)
        self._looked = now
        if self._limit and now - self._heard > self._limit:
            self.silence = f"no response for {self._limit:g} s"
            raise ConnectionAbortedError(errno.ECONNABORTED, self.silence)

    def _ask_if_due(self) -> None:
        now = time.monotonic()
        if self._ask and now - max(self._heard, self._asked) >= self._interval:
            self._asked = now
            self._ask()
