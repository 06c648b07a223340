"""A socket that knows when its peer has fallen silent.

paramiko's own keepalive does not find a dead peer: it asks for no answer, it is put off by
every write (a launcher that pings each host would put it off for ever), and a thread that is
blocked in a write waits without limit. TCP does not know either how a connection through a jump
host or a command is doing, nor whether an sshd whose kernel still answers is alive. So every
connection, whatever it runs over, counts here when bytes last came; when none came for a while it
asks for a sign of life, which every SSH server must answer; and when none follows, all reads and
writes fail. Both the reading thread and blocked writers look, so it does not matter who waits.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

READ_SIZE = 1 << 18
POLL = 1.0
"""Seconds between looks at a silent connection; paramiko's own 0.1 would cost a launcher with
hundreds of idle hosts a good part of a core."""


class ByteStream(Protocol):
    """What a connection runs over: a TCP socket, a paramiko channel, or a command's socket."""

    def send(self, data: bytes, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def settimeout(self, seconds: float | None, /) -> None: ...
    def close(self) -> None: ...


class LiveSocket:
    """Wraps ``stream`` for paramiko's Transport. ``watch`` starts the watching."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._buffer = memoryview(b"")
        self._heard = time.monotonic()
        self._asked = self._heard
        self._interval = 0.0
        self._limit = 0.0
        self._ask: Callable[[], None] | None = None
        self._closed = False
        self.greeting = b""
        """The first bytes that came: a server that turns a client away may say why."""
        self.silence = ""
        """How the connection was given up, once it was."""

    def watch(self, interval: float, count: int, ask: Callable[[], None]) -> None:
        """From now on call ``ask`` after each ``interval`` seconds of silence, and give the
        connection up after ``count`` of them."""
        self._heard = self._asked = time.monotonic()
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
                data = self._stream.recv(READ_SIZE)
            except TimeoutError:
                self._check()
                self._ask_if_due()
                raise
            self._heard = time.monotonic()
            if len(self.greeting) < 256:
                self.greeting += data[:256]
            # paramiko reads a packet's first block and the rest one by one: two system calls
            # (or two moves of a channel's whole buffer) for each, without this buffer.
            self._buffer = memoryview(data)
        piece, self._buffer = self._buffer[:size], self._buffer[size:]
        return bytes(piece)

    def settimeout(self, seconds: float | None) -> None:
        """paramiko asks for 0.1 s; closing wakes a reader here, so rare looks are enough."""
        poll = min(POLL, self._interval / 2) if self._interval else POLL
        self._stream.settimeout(poll)

    def close(self) -> None:
        self._closed = True
        if isinstance(self._stream, socket.socket):
            # A thread that sleeps in recv is woken by this, and not by close.
            with suppress(OSError):
                self._stream.shutdown(socket.SHUT_RDWR)
        # A channel says goodbye over the jump host's connection, which may be gone already.
        with suppress(Exception):
            self._stream.close()

    def getpeername(self) -> object:
        return getattr(self._stream, "getpeername", lambda: None)()

    def _check(self) -> None:
        silent = time.monotonic() - self._heard
        if self._limit and silent > self._limit:
            self.silence = f"no sign of life for {self._limit:g} s"
            raise ConnectionAbortedError(errno.ECONNABORTED, self.silence)

    def _ask_if_due(self) -> None:
        now = time.monotonic()
        if self._ask and now - max(self._heard, self._asked) >= self._interval:
            self._asked = now
            self._ask()
