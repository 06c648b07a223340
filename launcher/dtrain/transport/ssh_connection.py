"""An established SSH connection and its processes."""

from __future__ import annotations

import errno
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, cast

import paramiko
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_FAILURE,
    MSG_CHANNEL_REQUEST,
    MSG_CHANNEL_WINDOW_ADJUST,
    cMSG_GLOBAL_REQUEST,
)
from paramiko.packet import Packetizer

from dtrain.diagnostics import ConnectError
from dtrain.framing import clean
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.live_socket import ByteStream, LiveSocket
from dtrain.transport.local import STDERR_GRACE
from dtrain.transport.output_pipe import WINDOW, OutputPipe
from dtrain.transport.server_key import CERTIFICATE_SUFFIX, key_type
from dtrain.transport.tail import Tail

WRITE_PIECE = 1 << 16
MAX_PACKET = 1 << 18
"""Bytes of the longest packet that OpenSSH sends or accepts."""
MAX_GREETING = 1 << 16
"""Bytes that a server may send before its SSH handshake begins."""

# Without a handler, paramiko's warnings and tracebacks would appear on the terminal.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


def _channel_request(channel: paramiko.Channel, message: paramiko.Message) -> None:
    """Record ``exit-signal`` requests, which paramiko drops. paramiko handles all others."""
    if message.get_text() == "exit-signal":
        message.get_boolean()
        number = getattr(signal, f"SIG{message.get_text()}", signal.SIGKILL)
        cast(ClientTransport, channel.transport).exit_signals[channel.chanid] = int(number)
        channel.status_event.set()
        return
    message.rewind()
    message.get_int()
    channel._handle_request(message)  # type: ignore[attr-defined]


def _check_window(channel: paramiko.Channel) -> None:
    """paramiko stores all that arrives, even from a server that ignores the channel's window."""
    if len(channel.in_buffer) + len(channel.in_stderr_buffer) > WINDOW:
        raise paramiko.SSHException("the server sent more data than the window allows")


def _channel_data(channel: paramiko.Channel, message: paramiko.Message) -> None:
    _check_window(channel)
    channel._feed(message)  # type: ignore[attr-defined]


def _channel_stderr(channel: paramiko.Channel, message: paramiko.Message) -> None:
    _check_window(channel)
    channel._feed_extended(message)  # type: ignore[attr-defined]


class BoundedPacketizer(Packetizer):
    """paramiko reads packets of up to 4 GiB, and greetings without end, at quadratic cost. It
    limits a handshake by a thread, which it ends again with each packet."""

    _greeting = 0
    _deadline = math.inf

    def start_handshake(self, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout

    def handshake_timed_out(self) -> bool:
        return time.monotonic() > self._deadline

    def complete_handshake(self) -> None:
        self._deadline = math.inf

    def read_all(self, n: int, check_rekey: bool = False) -> bytes:
        if n > MAX_PACKET:
            raise paramiko.SSHException(f"the server sent a packet of over {MAX_PACKET} bytes")
        return bytes(super().read_all(n, check_rekey))

    def _read_timeout(self, timeout: float) -> bytes:
        data = bytes(super()._read_timeout(timeout))  # type: ignore[misc]
        self._greeting += len(data)
        if self._greeting > MAX_GREETING:
            raise paramiko.SSHException("the server's greeting does not end")
        return data


class HostKeyProofError(paramiko.SSHException):
    """The server did not prove that it owns the host key that it presented."""


class ClientTransport(paramiko.Transport):
    """paramiko's transport with additions.

    It keeps the host key as the server sent it, records exit signals and the server's reason to
    disconnect, and never prints a traceback from its thread.
    """

    _channel_handler_table: ClassVar[dict[int, Callable[..., None]]] = {
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]
        MSG_CHANNEL_DATA: _channel_data,
        MSG_CHANNEL_EXTENDED_DATA: _channel_stderr,
        MSG_CHANNEL_REQUEST: _channel_request,
    }

    def __init__(self, stream: ByteStream) -> None:
        self.live = LiveSocket(stream)
        self.exit_signals: dict[int, int] = {}
        self.service_accepted = False
        """Whether the server has accepted the authentication service."""
        self.farewell = ""
        """The server's message when it closed the connection."""
        self.host_key_blob = b""
        """The key or certificate that the server has proved to own."""
        self._delayed: deque[paramiko.Message] = deque()
        """Messages to send when the key exchange in progress ends."""
        super().__init__(
            self.live,  # type: ignore[arg-type]
            default_window_size=WINDOW,
            packetizer_class=BoundedPacketizer,
        )
        self._closed_channels: set[bytes] = set()
        """The server's numbers of channels that this end has closed."""
        self._sent = threading.Condition(self.clear_to_send_lock)
        """Notified once no message is delayed."""
        carrier = stream.get_transport() if isinstance(stream, paramiko.Channel) else None
        self._carrier = cast("ClientTransport | None", carrier)
        """The connection to the jump host that carries this one."""

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:  # noqa: BLE001 (the thread's last line of defence)
            self.saved_exception = error
        with self._sent:
            self._delayed.clear()
            self._sent.notify_all()

    @property
    def preferred_keys(self) -> tuple[str, ...]:
        """The key types in the configured order. paramiko itself moves certificates to the end."""
        return tuple(self._filter_algorithm("keys"))  # type: ignore[attr-defined]

    def request_keepalive(self) -> None:
        """Send a request that every server must answer. Runs in this connection's thread."""
        if not self.clear_to_send.is_set():
            return  # A key exchange is in progress. The server must answer that as well.
        request = paramiko.Message()
        request.add_byte(cMSG_GLOBAL_REQUEST)
        request.add_string("keepalive@openssh.com")
        request.add_boolean(True)
        self.packetizer.send_message(request)

    def explain(self) -> str:
        """The reason why the connection ended."""
        if self.live.silence:
            return self.live.silence
        if self.farewell:
            return f"message from the server: {self.farewell}"
        error = self.saved_exception
        if error is None or isinstance(error, EOFError):
            return "the server closed the connection"
        if isinstance(error, OSError) and error.errno == errno.ECONNRESET:
            return "the connection was reset"
        return str(error) or type(error).__name__

    def close(self) -> None:
        super().close()
        self.live.close()
        # paramiko wakes a thread that waits for the handshake only if the server ends it.
        if self.completion_event:
            self.completion_event.set()

    def _verify_key(self, host_key: bytes, signature: bytes) -> None:
        """Called after each key exchange. paramiko accepts any key of the right family, even a
        different one each time."""
        algorithm = str(self.host_key_type)
        kind = key_type(algorithm)
        if paramiko.Message(host_key).get_binary() != kind.encode():
            raise HostKeyProofError(f"its host key is not of the negotiated type {kind}")
        signed_with = algorithm.removesuffix(CERTIFICATE_SUFFIX)
        if paramiko.Message(signature).get_binary() != signed_with.encode():
            raise HostKeyProofError(f"it does not sign with {signed_with}, which was negotiated")
        if self.host_key_blob and host_key != self.host_key_blob:
            raise HostKeyProofError("its host key changed during the connection")
        try:
            super()._verify_key(host_key, signature)  # type: ignore[misc]
        except Exception as error:
            raise HostKeyProofError("its host key or signature is invalid") from error
        # Files of known and of revoked keys are compared byte by byte, and paramiko reads a key
        # with other bytes, too. A certificate's key is written again before it is compared.
        assert self.host_key is not None  # noqa: S101 (types)
        certified = algorithm.endswith(CERTIFICATE_SUFFIX)
        if not certified and self.host_key.asbytes() != host_key:
            raise HostKeyProofError("its host key is not in the standard encoding")
        self.host_key_blob = host_key

    def _send_user_message(self, message: paramiko.Message) -> None:
        """Send a message, or queue it until a key exchange ends. Messages of all threads keep their
        order: a server disconnects a client that sends data to a channel after its close. A thread
        may have found the channel open just before another thread closes it."""
        with self.clear_to_send_lock:
            if not self.is_active() or self._follows_close(message.asbytes()[:5]):
                return
            if self._delayed or not self.clear_to_send.is_set():
                self._delayed.append(message)
            else:
                self.packetizer.send_message(message)

    def _follows_close(self, head: bytes) -> bool:
        """Whether a message that begins with ``head`` is for a closed channel. Notes a close."""
        kind, number = head[0], head[1:]
        if not MSG_CHANNEL_WINDOW_ADJUST <= kind <= MSG_CHANNEL_FAILURE:
            return False
        if number in self._closed_channels:
            return True
        if kind == MSG_CHANNEL_CLOSE:
            self._closed_channels.add(number)
        return False

    def _parse_channel_open_success(self, message: paramiko.Message) -> None:
        message.get_int()
        number = message.get_bytes(4)  # which a closed channel may have had
        message.rewind()
        with self.clear_to_send_lock:
            self._closed_channels.discard(number)
        super()._parse_channel_open_success(message)  # type: ignore[misc]

    def wait_until_sent(self) -> None:
        """Wait until all messages are sent, or the connection has ended. Not for its own thread."""
        with self._sent:
            self._sent.wait_for(lambda: not self._delayed)
        if self._carrier is not None:
            self._carrier.wait_until_sent()

    def _parse_newkeys(self, message: paramiko.Message) -> None:
        super()._parse_newkeys(message)  # type: ignore[misc]
        with self._sent:
            while self._delayed:
                self.packetizer.send_message(self._delayed.popleft())
            self._sent.notify_all()

    def _parse_disconnect(self, message: paramiko.Message) -> None:
        message.get_int()
        self.farewell = clean(message.get_binary()[:400].decode(errors="replace"))[:200]


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
        try:
            channel = self._transport.open_session(timeout=self.endpoint.timeout)
            channel.in_buffer = output = OutputPipe(channel)
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
                    hint="MaxSessions in its sshd_config (default 10) limits concurrent commands",
                ) from error
            raise self.endpoint.error(
                ConnectError,
                f"sshd refused to run the command ({error})",
                attempted=attempted,
                hint=f"check whether `{self.endpoint.command} true` works",
            ) from error
        return SshProcess(channel, output, self._transport, self)

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
        return self.endpoint.error(
            ConnectError,
            f"the connection to {self.endpoint.place} was lost: {reason}",
            attempted=attempted,
            hint=f"check whether `{self.endpoint.command}` still works",
        )


class _OnFirst(threading.Event):
    """Runs ``work`` in a thread once paramiko sets it: when data arrives, and at the end."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._begun = False
        self.done = threading.Event()

    def set(self) -> None:
        # paramiko holds the pipe's lock.
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._work()
        self.done.set()


class SshProcess:
    """A command on an SSH channel.

    stdout and stderr share the channel's window. From the first data on, a thread reads stderr, so
    that a command that fills stderr cannot block stdout. Most commands write none.
    """

    def __init__(
        self,
        channel: paramiko.Channel,
        output: OutputPipe,
        transport: ClientTransport,
        connection: SshConnection,
    ) -> None:
        self._channel = channel
        self._output = output
        self._transport = transport
        self._connection = connection
        self._closed = False
        self._write_lock = threading.Lock()
        self._stdin_closed = False
        self._tail = Tail()
        self._drain = _OnFirst(self._drain_stderr)
        channel.in_stderr_buffer.set_event(self._drain)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        # One writer at a time: pieces of two writes must not alternate.
        with self._write_lock:
            while view and not self._closed and not self._stdin_closed:
                if self._broken():
                    raise self._connection.lost("writing to a command")
                try:
                    sent = self._channel.send(bytes(view[:WRITE_PIECE]))
                except (paramiko.SSHException, EOFError, OSError):
                    sent = 0
                if sent == 0:
                    break
                view = view[sent:]
        # The caller may close the connection, which would drop what waits for a key exchange.
        self._transport.wait_until_sent()
        if view and not self._closed and self._broken():
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
        self._drain.done.wait(min(STDERR_GRACE, left))
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

    def _drain_stderr(self) -> None:
        with suppress(paramiko.SSHException, EOFError, OSError):
            while data := self._channel.recv_stderr(1 << 18):
                self._tail.feed(data)
