"""What every transport does: reach a host, and run a command there as a process with pipes.

All calls block. One connection carries several processes at once, each used by one thread for
reading and any thread for writing.
"""

from __future__ import annotations

from typing import Protocol

from dtrain.spec.model import Host


class RemoteProcess(Protocol):
    """A command running on a host."""

    def write(self, data: bytes) -> None:
        """Write all of ``data`` to its stdin. Raises ConnectError when the connection is gone,
        and silently drops the data when only the process is gone."""

    def close_stdin(self) -> None: ...

    def read(self, size: int = 1 << 18) -> bytes:
        """At least one byte of its stdout, at most ``size``; ``b""`` at its end, and once the
        process or its connection was closed from here.
        Raises ConnectError when the connection breaks first."""

    def stderr(self) -> bytes:
        """The last 64 KiB that it has written to stderr so far; complete after `wait`,
        unless something that the command left behind still holds it open."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal; 127 when the command was not found.
        Raises TimeoutError after ``timeout`` seconds, ConnectError when the connection breaks."""

    def close(self) -> None:
        """Let go of it: its pipes close; it is not killed. Safe to call twice."""


class TcpStream(Protocol):
    """A TCP connection, as a socket is one."""

    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Connection(Protocol):
    """A host that has been reached."""

    def start(self, command: str) -> RemoteProcess:
        """Run ``command`` with the host's shell (quote with `dtrain.quoting`)."""

    def dial(self, port: int, timeout: float) -> TcpStream:
        """Connect to a port that something on the host listens on at 127.0.0.1.
        Raises ConnectError when nothing does, or not within ``timeout`` seconds."""

    def close(self) -> None:
        """Close all of it, from any thread; blocked reads end. Safe to call twice."""


class Transport(Protocol):
    """Makes connections. One object serves a whole launch, from many threads at once."""

    def connect(self, host: Host) -> Connection:
        """Raises ConnectError, HostKeyError or AuthError, each with a hint."""

    def close(self) -> None:
        """Close what connections share (a jump host, say)."""
