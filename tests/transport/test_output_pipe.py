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
from dtrain.transport.ssh_connection import BoundedPacketizer, ClientTransport
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


def test_a_window_that_is_full_before_the_receiver_exists_is_acknowledged(
    tmp_path: Path, transport: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, full, ended = OutputPipe.feed, threading.Event(), threading.Event()

    def watch(pipe: OutputPipe, data: bytes) -> None:
        feed(pipe, data)
        if len(pipe) == WINDOW:
            full.set()

    received: list[bytes] = []

    def receive(data: bytes | ConnectError) -> bool:
        if not isinstance(data, bytes) or not data:
            ended.set()
            return False
        received.append(data)
        return True

    monkeypatch.setattr(OutputPipe, "feed", watch)
    key = generate_key(tmp_path / "key")
    with Filling(base64.b64decode(Path(f"{key}.pub").read_text().split()[1])) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("fill")
        assert full.wait(HANG)
        process.follow(receive)
        assert ended.wait(HANG)
        connection.close()
    assert b"".join(received) == bytes(WINDOW) + b"more"


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
    tmp_path: Path, transport: SshTransport
) -> None:
    key = generate_key(tmp_path / "key")
    public = base64.b64decode(Path(f"{key}.pub").read_text().split()[1])
    with Flooding(public) as server:
        process = transport.connect(host_of(server, key, tmp_path)).start("flood")
        assert server.sent.wait(HANG)
        with pytest.raises(ConnectError, match="more data than the window allows"):
            while process.read():
                pass
