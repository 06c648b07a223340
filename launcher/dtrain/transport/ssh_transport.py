"""paramiko's transport, made strict: limits, proofs of host keys, and the order of messages."""

from __future__ import annotations

import errno
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, cast

import paramiko
from paramiko.common import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_FAILURE,
    MSG_CHANNEL_REQUEST,
    MSG_CHANNEL_WINDOW_ADJUST,
    cMSG_GLOBAL_REQUEST,
    cMSG_REQUEST_FAILURE,
)
from paramiko.kex_curve25519 import KexCurve25519
from paramiko.packet import Packetizer

from dtrain.framing import clean
from dtrain.transport.live_socket import ByteStream, LiveSocket
from dtrain.transport.output_pipe import WINDOW
from dtrain.transport.server_key import CERTIFICATE_SUFFIX, key_type

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

    # RFC 8731 gives the same method a second name, and some servers allow only that. OpenSSL has no
    # such method in FIPS mode.
    _kex_info: ClassVar[dict[str, type]] = {
        "curve25519-sha256": KexCurve25519,
        **paramiko.Transport._kex_info,  # type: ignore[attr-defined]
    }
    # The method that resists quantum computers stays first, or sshd logs a warning.
    _preferred_kex: ClassVar[tuple[str, ...]] = tuple(
        dict.fromkeys(
            name
            for known in paramiko.Transport._preferred_kex  # type: ignore[attr-defined]
            for name in (known.removesuffix("@libssh.org"), known)
        )
    )

    def __init__(self, stream: ByteStream) -> None:
        self.live = LiveSocket(stream)
        self.offered: dict[str, list[str]] = {}
        """The server's algorithms, as paramiko parses them."""
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

    def _really_parse_kex_init(self, message: paramiko.Message) -> dict[str, Any]:
        parsed: dict[str, Any] = super()._really_parse_kex_init(message)  # type: ignore[misc]
        self.offered = parsed
        return parsed

    def request_keepalive(self) -> None:
        """Send a request that every server must answer. Runs in this connection's thread."""
        if not self.clear_to_send.is_set():
            return  # A key exchange is in progress. The server must answer that as well.
        request = paramiko.Message()
        request.add_byte(cMSG_GLOBAL_REQUEST)
        request.add_string("keepalive@openssh.com")
        request.add_boolean(True)
        self.packetizer.send_message(request)

    def _parse_global_request(self, message: paramiko.Message) -> None:
        """Refuse it, such as a keepalive request, as paramiko does, but not during a key exchange:
        since OpenSSH 10.4, sshd disconnects a client that sends anything else then."""
        message.get_text()
        if message.get_boolean():
            refusal = paramiko.Message()
            refusal.add_byte(cMSG_REQUEST_FAILURE)
            self._send_user_message(refusal)

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
