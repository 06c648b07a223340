"""The output of a command on an SSH channel that a function receives."""

from __future__ import annotations

import base64
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import paramiko
import pytest

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.output_pipe import WINDOW, OutputPipe
from dtrain.transport.ssh import SshTransport
from dtrain.transport.ssh_connection import BoundedPacketizer, ClientTransport, SshConnection
from support.limits import HANG
from support.ssh_server import SshServer
from support.sshd import generate_key, host_on, running_sshd


def test_an_empty_piece_is_not_the_end() -> None:
    received: list[bytes] = []
    pipe = OutputPipe(paramiko.Channel(0))
    pipe.follow(lambda data: not received.append(data))
    pipe.feed(b"")
    assert received == []


def test_output_that_nobody_wants_is_not_acknowledged() -> None:
    received: list[bytes] = []
    pipe = OutputPipe(paramiko.Channel(0))  # without a connection, so an acknowledgement fails
    pipe.follow(lambda data: bool(received.append(data)))
    first = bytes(WINDOW)  # as much as a server sends without an acknowledgement
    pipe.feed(first)
    pipe.feed(b"second")
    assert received == [first]


@pytest.mark.sshd
@pytest.mark.parametrize("who", ["server", "client"])
def test_output_continues_after_new_keys(
    who: str, tmp_path: Path, transport: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many exchanges within one window: output that arrives during an exchange is acknowledged late.
    if who == "client":
        monkeypatch.setattr(BoundedPacketizer, "REKEY_BYTES", 1 << 20)
    exchanges = []
    parse = ClientTransport._parse_newkeys

    def count(self: ClientTransport, message: paramiko.Message) -> None:
        exchanges.append(message)
        parse(self, message)

    monkeypatch.setattr(ClientTransport, "_parse_newkeys", count)
    settings = {"RekeyLimit": "1M"} if who == "server" else {}
    with running_sshd(tmp_path / "server", settings=settings) as sshd:
        connection = transport.connect(host_on(sshd, "gpu01"))
        process = connection.start(f"head -c {3 * WINDOW} /dev/zero")
        size, ended = 0, threading.Event()

        def receive(data: Any) -> bool:
            nonlocal size
            if not data:
                ended.set()
            size += len(data)
            return True

        process.follow(receive)
        assert ended.wait(HANG)
        connection.close()
    assert size == 3 * WINDOW
    assert len(exchanges) > 3


def host_of(server: SshServer, key: Path, folder: Path) -> Host:
    (folder / "known").write_text(server.host_key_line)
    ssh = Ssh(port=server.port, known_hosts=str(folder / "known"), identity=str(key))
    return Host("gpu01", "127.0.0.1", ssh=ssh)


class Filling(SshServer):
    """Fills the client's window, and then sends more."""

    def execute(self, channel: paramiko.Channel, command: bytes) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):  # the client may close first
            channel.sendall(bytes(WINDOW))
            channel.sendall(b"more")
            channel.send_exit_status(0)
            channel.close()


class Echo(SshServer):
    """Returns one line."""

    def execute(self, channel: paramiko.Channel, command: bytes) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):
            channel.sendall(channel.makefile("rb").readline())
            channel.send_exit_status(0)
            channel.close()


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return generate_key(tmp_path / "key")


def blob(key: Path) -> bytes:
    return base64.b64decode(Path(f"{key}.pub").read_text().split()[1])


class Received:
    """A receiver, which waits for the end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._ended = threading.Event()

    def __call__(self, data: bytes | ConnectError) -> bool:
        if not isinstance(data, bytes) or not data:
            self._ended.set()
            return False
        self._pieces.append(data)
        return True

    @property
    def whole(self) -> bytes:
        assert self._ended.wait(HANG)
        return b"".join(self._pieces)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the window is full."""
    feed, full = OutputPipe.feed, threading.Event()

    def watch(pipe: OutputPipe, data: bytes) -> None:
        feed(pipe, data)
        if len(pipe) == WINDOW:
            full.set()

    monkeypatch.setattr(OutputPipe, "feed", watch)
    return full


def test_a_window_that_is_full_before_the_receiver_exists_is_acknowledged(
    tmp_path: Path, transport: SshTransport, key: Path, full: threading.Event
) -> None:
    received = Received()
    with Filling(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("fill")
        assert full.wait(HANG)
        process.follow(received)
        assert received.whole == bytes(WINDOW) + b"more"
        connection.close()


class LongExchange:
    """A key exchange that lasts longer than paramiko waits."""

    def __init__(self, connection: SshConnection, monkeypatch: pytest.MonkeyPatch) -> None:
        self._clear = connection._transport.clear_to_send
        self._looks = 0
        self._waited = threading.Event()
        self._clear.clear()
        monkeypatch.setattr(paramiko.transport, "time", self)

    def time(self) -> float:
        self._looks += 1
        if self._looks > 2:
            self._waited.set()
        return self._looks * 31.0

    def end(self) -> None:
        """End it once a thread waits."""
        assert self._waited.wait(HANG)
        self._clear.set()


def test_an_acknowledgement_waits_for_new_keys(
    tmp_path: Path, transport: SshTransport, key: Path, full: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    received = Received()
    with Filling(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("fill")
        assert full.wait(HANG)
        exchange = LongExchange(connection, monkeypatch)
        threading.Thread(target=process.follow, args=(received,), daemon=True).start()
        exchange.end()
        assert received.whole == bytes(WINDOW) + b"more"
        connection.close()


def test_a_command_waits_for_new_keys(
    tmp_path: Path, transport: SshTransport, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = Received()
    with Echo(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("echo")
        process.follow(received)
        exchange = LongExchange(connection, monkeypatch)
        threading.Thread(target=process.write, args=(b"start\n",), daemon=True).start()
        exchange.end()
        assert received.whole == b"start\n"
        connection.close()


def test_a_channel_that_the_server_closes_before_new_keys(
    tmp_path: Path, transport: SshTransport, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    negotiate = paramiko.Transport._negotiate_keys  # type: ignore[attr-defined]

    def close_channels_first(self: paramiko.Transport, message: paramiko.Message) -> None:
        if self.server_mode and self.initial_kex_done:
            for channel in self._channels.values():  # type: ignore[attr-defined]
                channel.close()
        negotiate(self, message)

    monkeypatch.setattr(paramiko.Transport, "_negotiate_keys", close_channels_first)
    with Echo(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        connection.start("echo")
        connection._transport.renegotiate_keys()
        after = connection.start("echo")
        after.write(b"again\n")
        assert after.read() == b"again\n"
        connection.close()


class Flooding(SshServer):
    """Ignores the window of the client, which reads nothing before ``sent``."""

    def __init__(self, authorized: bytes) -> None:
        super().__init__(authorized)
        self.sent = threading.Event()

    def execute(self, channel: paramiko.Channel, command: bytes) -> None:
        channel.out_window_size = 1 << 40
        with suppress(OSError, EOFError, paramiko.SSHException):
            for _ in range(4):
                channel.sendall(bytes(WINDOW))
            channel.send_exit_status(0)
            channel.close()
        self.sent.set()


def test_a_server_that_ignores_the_window_is_disconnected(
    tmp_path: Path, transport: SshTransport, key: Path
) -> None:
    with Flooding(blob(key)) as server:
        process = transport.connect(host_of(server, key, tmp_path)).start("flood")
        assert server.sent.wait(HANG)
        with pytest.raises(ConnectError, match="more data than the window allows"):
            while process.read():
                pass
