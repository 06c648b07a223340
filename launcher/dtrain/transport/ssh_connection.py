"""An SSH connection that is up, and the processes on it."""

from __future__ import annotations

import errno
import logging
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, cast

import paramiko
from paramiko.common import MSG_CHANNEL_REQUEST, cMSG_GLOBAL_REQUEST

from dtrain.diagnostics import ConnectError
from dtrain.framing import clean
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.live_socket import ByteStream, LiveSocket
from dtrain.transport.local import STDERR_GRACE
from dtrain.transport.server_key import CERTIFICATE_SUFFIX
from dtrain.transport.tail import Tail

WINDOW = 4 << 20
"""Bytes that a process may be ahead of its reader."""
WRITE_PIECE = 1 << 16

# Without a handler of its own, paramiko's warnings and tracebacks would end up on the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


def _channel_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """paramiko drops ``exit-signal`` requests; everything else it handles itself."""
    if message.get_text() == "exit-signal":
        message.get_boolean()
        number = getattr(signal, f"SIG{message.get_text()}", signal.SIGKILL)
        cast(ClientTransport, channel.transport).exit_signals[channel.chanid] = int(number)
        channel.status_event.set()
        return
    message.rewind()
    message.get_int()
    channel._handle_request(message)  # type: ignore[attr-defined]


class HostKeyProofError(paramiko.SSHException):
    """The server has not proved that it has the host key that it shows."""


class ClientTransport(paramiko.Transport):
    """paramiko's transport, which also keeps the host key as the server sent it, notes exit
    signals and why the server hung up, and never prints a traceback from its thread."""

    _channel_handler_table: ClassVar[dict[int, Callable[..., None]]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_REQUEST: _channel_request,
    }

    def __init__(self, stream: ByteStream) -> None:
        self.live = LiveSocket(stream)
        self.exit_signals: dict[int, int] = {}
        self.farewell = ""
        """What the server said when it ended the connection."""
        self.host_key_blob = b""
        """The key, or the certificate, that the server has proved to have."""
        super().__init__(self.live, default_window_size=WINDOW)  # type: ignore[arg-type]

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # noqa: BLE001 (the thread's last line of defence)
            self.saved_exception = error
        finally:
            # An unfinished handshake leaves a timer that would hold up the interpreter's end.
            self.packetizer.complete_handshake()

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """paramiko would ask for certificates last, whatever the order that was set."""
        return tuple(self._filter_algorithm("keys"))  # type: ignore[attr-defined]

    def ask_for_life(self) -> None:
        """Ask the server for an answer of any kind. Called in this connection's own thread."""
        if not self.clear_to_send.is_set():
            return  # In the middle of a key exchange, which the server has to answer as well.
        request = paramiko.Message()
        request.add_byte(cMSG_GLOBAL_REQUEST)
        request.add_string("keepalive@openssh.com")
        request.add_boolean(True)
        self.packetizer.send_message(request)

    def explain(self) -> str:
        """Why the connection ended."""
        if self.live.silence:
            return self.live.silence
        if self.farewell:
            return f"the server said: {self.farewell}"
        error = self.saved_exception
        if error is None or isinstance(error, EOFError):
            return "the server closed the connection"
        if isinstance(error, OSError) and error.errno == errno.ECONNRESET:
            return "the connection was reset"
        return str(error) or type(error).__name__

    def close(self) -> None:
        super().close()
        self.live.close()
        # paramiko wakes whoever waits for the handshake only when the server ends it.
        if self.completion_event:
            self.completion_event.set()

    def _verify_key(self, host_key: bytes, signature: bytes) -> None:
        """Called after each key exchange. paramiko takes any key of the right family, and another
        one each time."""
        algorithm = str(self.host_key_type)
        kind = re.sub("^rsa-sha2-(256|512)", "ssh-rsa", algorithm)
        if paramiko.Message(host_key).get_binary() != kind.encode():
            raise HostKeyProofError(f"it shows a host key of another type than {kind}")
        signed_with = algorithm.removesuffix(CERTIFICATE_SUFFIX)
        if paramiko.Message(signature).get_binary() != signed_with.encode():
            raise HostKeyProofError(f"it does not sign with {signed_with}, as agreed")
        if self.host_key_blob and host_key != self.host_key_blob:
            raise HostKeyProofError("it changed its host key while it was connected")
        try:
            super()._verify_key(host_key, signature)  # type: ignore[misc]
        except Exception as error:
            raise HostKeyProofError("its host key is damaged, or the signature is wrong") from error
        self.host_key_blob = host_key

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        message.get_int()
        self.farewell = clean(message.get_binary()[:400].decode(errors="replace"))[:200]


class SshConnection:
    """A host that has been reached and logged in to."""

    def __init__(self, endpoint: Endpoint, transport: ClientTransport) -> None:
        self.endpoint = endpoint
        self._transport = transport
        self.closed = False
        """Whether it was closed from here."""
        transport.live.watch(endpoint.alive_interval, endpoint.alive_count, transport.ask_for_life)

    @property
    def alive(self) -> bool:
        return self._transport.is_active()

    def start(self, command: str) -> SshProcess:
        attempted = f"starting a command on {self.endpoint.host} ({self.endpoint.place})"
        try:
            channel = self._transport.open_session(timeout=self.endpoint.timeout)
            # File names that are not UTF-8 come through as they were.
            channel.exec_command(command.encode("utf-8", "surrogateescape"))
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not self.alive:
                raise self.lost(attempted) from error
            if isinstance(error, paramiko.ChannelException):
                raise ConnectError(
                    self.endpoint.host,
                    attempted,
                    f"sshd refused another session ({error.text.lower()})",
                    hint="its MaxSessions (10 unless configured) bounds commands at a time",
                ) from error
            raise ConnectError(
                self.endpoint.host,
                attempted,
                f"sshd refused to run it ({error})",
                hint=f"see whether `{self.endpoint.command} true` works",
            ) from error
        return SshProcess(channel, self._transport, self)

    def open_stream(self, address: str, port: int, timeout: float) -> paramiko.Channel:
        """A TCP connection made by this host. Raises paramiko's ChannelException when the host
        refuses or cannot, other SSHExceptions, EOFError or OSError when this connection breaks."""
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
            raise ConnectError(
                self.endpoint.host,
                attempted,
                f"sshd did not connect: {reason.lower()}",
                hint="nothing may listen there, or its AllowTcpForwarding is off",
            ) from error

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    def lost(self, attempted: str) -> ConnectError:
        """The error for something that the end of this connection cut short."""
        if self.closed:
            return ConnectError(self.endpoint.host, attempted, "the connection was closed here")
        if self.alive and self._transport.saved_exception is None:
            reason = "the server closed the command's channel before the command ended"
            return ConnectError(self.endpoint.host, attempted, reason)
        reason = self._transport.explain()
        return ConnectError(
            self.endpoint.host,
            attempted,
            f"the connection to {self.endpoint.place} was lost: {reason}",
            hint=f"see whether `{self.endpoint.command}` still gets in",
        )


class SshProcess:
    """A command on an SSH channel.

    stdout and stderr share the channel's window, so stderr is read all the time by a thread of
    its own: a command that fills it must not stop the other.
    """

    def __init__(
        self,
        channel: paramiko.Channel,
        transport: ClientTransport,
        connection: SshConnection,
    ) -> None:
        self._channel = channel
        self._transport = transport
        self._connection = connection
        self._let_go = False
        self._write_lock = threading.Lock()
        self._stdin_closed = False
        self._tail = Tail()
        self._drain = threading.Thread(target=self._drain_stderr, daemon=True)
        self._drain.start()

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        # One writer at a time: pieces of two writes must not alternate.
        with self._write_lock:
            while view and not self._let_go and not self._stdin_closed:
                if self._broken():
                    raise self._connection.lost("writing to a command")
                try:
                    sent = self._channel.send(bytes(view[:WRITE_PIECE]))
                except (paramiko.SSHException, EOFError, OSError):
                    sent = 0
                if sent == 0:
                    break
                view = view[sent:]
        if view and not self._let_go and self._broken():
            raise self._connection.lost("writing to a command")

    def close_stdin(self) -> None:
        with self._write_lock:
            self._stdin_closed = True
            with suppress(paramiko.SSHException, EOFError, OSError):
                self._channel.shutdown_write()

    def read(self, size: int = 1 << 18) -> bytes:
        try:
            data = self._channel.recv(size)
        except (paramiko.SSHException, EOFError, OSError):
            # Reading acknowledges what came before, and that write failed.
            data = b""
        if not data and not self._released and not self._channel.eof_received:
            raise self._connection.lost("reading from a command")
        return data

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
        self._drain.join(min(STDERR_GRACE, left))
        return self._channel.exit_status if number is None else -number

    def close(self) -> None:
        self._let_go = True
        with suppress(paramiko.SSHException, EOFError, OSError):
            self._channel.close()

    @property
    def _released(self) -> bool:
        """Whether its end here was wanted: then reads end as if the command had."""
        return self._let_go or self._connection.closed

    def _broken(self) -> bool:
        # A channel that ends in order says so first; and paramiko closes the channels of a
        # broken connection before it declares the connection dead.
        closed = self._channel.closed and not self._channel.eof_received
        return closed or not self._transport.is_active()

    def _drain_stderr(self) -> None:
        with suppress(paramiko.SSHException, EOFError, OSError):
            while data := self._channel.recv_stderr(1 << 18):
                self._tail.feed(data)
