"""The interface of every transport: connect to a host, and run a command there with pipes.

All calls block. One connection can run several processes at once. One thread reads from each
process; any thread may write to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host


class RemoteProcess(Protocol):
    """A command running on a host."""

    def write(self, data: bytes) -> None:
        """Write all of ``data`` to stdin. Closing the connection afterwards does not drop it.

        Raises ConnectError if the connection is lost. If only the process has ended, the data is
        dropped silently. Not for the thread that `follow` uses.
        """

    def close_stdin(self) -> None: ...

    def read(self, size: int = 1 << 18) -> bytes:
        """Between 1 and ``size`` bytes of stdout. Returns ``b""`` at its end, and after `close`
        of this process or its connection.

        Raises ConnectError if the connection is lost first.
        """

    def follow(self, receive: Callable[[bytes | ConnectError], bool]) -> None:
        """Instead of `read`: call ``receive`` with what `read` would return or raise, also at the
        end, in one thread of the connection, until it returns False. It must not raise. While it
        runs and after it has returned False, the process can only fill the connection's buffers.
        """

    def stderr(self) -> bytes:
        """The last 64 KiB of stderr so far. Complete after `wait`, unless a background process
        of the command still holds stderr open."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status: negative for a signal, 127 if the command was not found.

        Raises TimeoutError after ``timeout`` seconds, and ConnectError if the connection is lost.
        """

    def close(self) -> None:
        """Close the pipes. Does not kill the process. Safe to call twice."""


class TcpStream(Protocol):
    """A TCP connection with the methods of a socket."""

    def recv(self, size: int, /) -> bytes: ...
    def sendall(self, data: bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Connection(Protocol):
    """An open connection to a host."""

    def start(self, command: str) -> RemoteProcess:
        """Run ``command`` in the host's shell. The caller quotes it, see `dtrain.quoting`."""

    def dial(self, port: int, timeout: float) -> TcpStream:
        """Connect to a port on 127.0.0.1 of the host.

        Raises ConnectError if nothing accepts the connection within ``timeout`` seconds.
        """

    def close(self) -> None:
        """Close the connection and its processes. Blocked reads return. Callable from any
        thread, and twice."""


class Transport(Protocol):
    """Opens connections. All threads of a launch share one object."""

    def connect(self, host: Host) -> Connection:
        """Raises ConnectError, HostKeyError or AuthError, each with a hint."""

    def close(self) -> None:
        """Close what connections share, such as the connection to a jump host."""
