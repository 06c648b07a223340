"""An established SSH connection and its processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import paramiko

from dtrain.diagnostics import ConnectError
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.local import STDERR_GRACE
from dtrain.transport.output_pipe import OutputPipe
from dtrain.transport.ssh_transport import ClientTransport
from dtrain.transport.tail import Tail

WRITE_PIECE = 1 << 16


class SshConnection:
    """A logged-in connection to a host."""

    def __init__(self, endpoint: Endpoint, transport: ClientTransport) -> None:
        self.endpoint = endpoint
        self._transport = transport
        self.closed = False
        """Whether `close` was called."""
        live = transport.live
        live.watch(endpoint.alive_interval, endpoint.alive_count, transport.request_keepalive)

    @property
    def alive(self) -> bool:
        return self._transport.is_active()

    def start(self, command: str) -> SshProcess:
        attempted = f"starting a command on {self.endpoint.host} ({self.endpoint.place})"
        timeout = self.endpoint.timeout
        reason = f"sshd opened no session within {timeout:g} s"
        try:
            channel = self._transport.open_session(timeout=timeout)
            reason = "sshd refused to run the command"
            process = SshProcess(channel, self._transport, self)
            # Preserves file names that are not UTF-8.
            channel.exec_command(command.encode("utf-8", "surrogateescape"))
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not self.alive:
                raise self.lost(attempted) from error
            if isinstance(error, paramiko.ChannelException):
                raise self.endpoint.error(
                    ConnectError,
                    f"sshd refused another session ({error.text.lower()})",
                    attempted=attempted,
                    hint="raise MaxSessions in its sshd_config (default 10): a launch needs 1, or"
                    " 2 if it sends files (`job.sync`)",
                ) from error
            raise self.endpoint.error(
                ConnectError,
                f"{reason} ({error})",
                attempted=attempted,
                hint=f"check whether `{self.endpoint.command} true` works",
            ) from error
        return process

    def open_stream(self, address: str, port: int, timeout: float) -> paramiko.Channel:
        """Let this host open a TCP connection.

        Raises paramiko's ChannelException if the host refuses or cannot, and another SSHException,
        EOFError or OSError if this connection is lost.
        """
        return self._transport.open_channel(
            "direct-tcpip", (address, port), ("127.0.0.1", 0), timeout=timeout
        )

    def dial(self, port: int, timeout: float) -> paramiko.Channel:
        attempted = f"connecting to port {port} of {self.endpoint.host} ({self.endpoint.place})"
        try:
            return self.open_stream("127.0.0.1", port, timeout)
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not self.alive:
                raise self.lost(attempted) from error
            reason = error.text if isinstance(error, paramiko.ChannelException) else str(error)
            raise self.endpoint.error(
                ConnectError,
                f"sshd did not connect: {reason.lower()}",
                attempted=attempted,
                hint="check that a program listens there, and that AllowTcpForwarding is on",
            ) from error

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    def lost(self, attempted: str) -> ConnectError:
        """The error for an operation that the end of this connection interrupted."""
        if self.closed:
            return self.endpoint.error(
                ConnectError, "dtrain closed the connection", attempted=attempted
            )
        if self.alive and self._transport.saved_exception is None:
            reason = "the server closed the channel before the command ended"
            return self.endpoint.error(ConnectError, reason, attempted=attempted)
        reason = self._transport.explain()
        hint = f"check whether `{self.endpoint.command}` still works"
        if self._transport.live.silence:
            ping = f"`ping -M do -s 1400 {self.endpoint.address}`"
            hint += f"; if it does, the network may lose large packets (MTU): {ping}"
        return self.endpoint.error(
            ConnectError,
            f"the connection to {self.endpoint.place} was lost: {reason}",
            attempted=attempted,
            hint=hint,
        )


class SshProcess:
    """A command on an SSH channel.

    stdout and stderr share the channel's window. What arrives on stderr is taken at once, so that a
    command that fills stderr cannot block stdout.
    """

    def __init__(
        self,
        channel: paramiko.Channel,
        transport: ClientTransport,
        connection: SshConnection,
    ) -> None:
        """``channel`` runs the command later."""
        self._channel = channel
        self._output = channel.in_buffer = OutputPipe(channel)
        self._transport = transport
        self._connection = connection
        self._closed = False
        self._write_lock = threading.Lock()
        self._tail = Tail()
        self._stderr_ended = threading.Event()
        channel.in_stderr_buffer = errors = OutputPipe(channel)
        errors.follow(self._take_stderr)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        # One writer at a time: pieces of two writes must not alternate.
        with self._write_lock:
            while view and not self._closed and not self._broken():
                try:
                    sent = self._channel.send(bytes(view[:WRITE_PIECE]))
                except (paramiko.SSHException, EOFError, OSError):
                    sent = 0
                if sent == 0:  # stdin is closed, here or there
                    break
                view = view[sent:]
        # The caller may close the connection, which would drop what waits for a key exchange.
        self._transport.wait_until_sent()
        if view and not self._closed and self._broken():
            raise self._connection.lost("writing to a command")

    def close_stdin(self) -> None:
        with self._write_lock, suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.shutdown_write()

    def read(self, size: int = 1 << 18) -> bytes:
        try:
            data = self._channel.recv(size)
        except (paramiko.SSHException, EOFError, OSError):
            # recv also acknowledges earlier data, and that write failed.
            data = b""
        if not data and self._is_cut_off:
            raise self._connection.lost("reading from a command")
        return data

    def follow(self, receive: Callable[[bytes | ConnectError], bool]) -> None:
        def take(data: bytes) -> bool:
            if not data and self._is_cut_off:
                return receive(self._connection.lost("reading from a command"))
            return receive(data)

        self._output.follow(take)

    @property
    def _is_cut_off(self) -> bool:
        return not self._released and not self._channel.eof_received

    def stderr(self) -> bytes:
        return self._tail.contents()

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._channel.status_event.wait(timeout):
            raise TimeoutError(f"still running after {timeout:g} s")
        number = self._transport.exit_signals.get(self._channel.chanid)
        if number is None and self._channel.exit_status == -1:
            raise self._connection.lost("waiting for a command")
        left = STDERR_GRACE if deadline is None else max(0.0, deadline - time.monotonic())
        self._stderr_ended.wait(min(STDERR_GRACE, left))
        return self._channel.exit_status if number is None else -number

    def close(self) -> None:
        self._closed = True
        with suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()

    @property
    def _released(self) -> bool:
        """Whether the process or its connection was closed here. Then reads return ``b""``."""
        return self._closed or self._connection.closed

    def _broken(self) -> bool:
        # A channel that ends normally sends EOF first. paramiko closes the channels of a broken
        # connection before it marks the connection as inactive.
        closed = self._channel.closed and not self._channel.eof_received
        return closed or not self._transport.is_active()

    def _take_stderr(self, data: bytes) -> bool:
        self._tail.feed(data)
        if not data:
            self._stderr_ended.set()
        return True
