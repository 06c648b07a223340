"""The output of a command on an SSH channel that a function receives."""

from __future__ import annotations

import base64
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.common import MSG_KEXINIT, cMSG_CHANNEL_DATA, cMSG_GLOBAL_REQUEST

from dtrain.diagnostics import ConnectError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.contract import RemoteProcess
from dtrain.transport.output_pipe import WINDOW, OutputPipe
from dtrain.transport.ssh import SshTransport
from dtrain.transport.ssh_connection import SshConnection
from dtrain.transport.ssh_transport import BoundedPacketizer, ClientTransport
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
        process = connection.start(f"head -c {6 * WINDOW} /dev/zero")
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
    assert size == 6 * WINDOW
    assert len(exchanges) > 3  # at least one in each window, however slow this machine is


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
    """A key exchange that the ``server`` does not answer before `end`."""

    def __init__(self, server: SshServer, connection: SshConnection) -> None:
        begun, self._go_on = threading.Event(), threading.Event()
        self._channels: tuple[paramiko.Channel, ...] = ()
        (transport,) = server._transports
        handlers: Any = transport._handler_table  # type: ignore[attr-defined]
        answer = handlers[MSG_KEXINIT]

        def answer_late(message: paramiko.Message) -> None:
            begun.set()
            assert self._go_on.wait(HANG)
            for channel in self._channels:
                channel.close()
            answer(message)

        handlers[MSG_KEXINIT] = answer_late

        def exchange() -> None:
            with suppress(EOFError, OSError, paramiko.SSHException):  # it may be closed
                connection._transport.renegotiate_keys()

        threading.Thread(target=exchange, daemon=True).start()
        assert begun.wait(HANG)

    def end(self, *channels: paramiko.Channel) -> None:
        """Let the server answer. Before that it closes the ``channels``."""
        self._channels = channels
        self._go_on.set()


def delay(work: Callable[[], object], delayed: threading.Event) -> threading.Thread:
    """Start ``work``, and return its thread once a message of it waits for new keys."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert delayed.wait(HANG)
    return thread


def delay_write_and_close(
    process: RemoteProcess, close: Callable[[], None], delayed: threading.Event
) -> None:
    def work() -> None:
        process.write(b"kill")
        close()

    delay(work, delayed)


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a message waits for new keys."""
    send, delayed = ClientTransport._send_user_message, threading.Event()

    def watch(self: ClientTransport, message: paramiko.Message) -> None:
        send(self, message)
        if self._delayed:
            delayed.set()

    monkeypatch.setattr(ClientTransport, "_send_user_message", watch)
    return delayed


def test_an_acknowledgement_follows_new_keys(
    tmp_path: Path, transport: SshTransport, key: Path, full: threading.Event,
) -> None:  # fmt: skip
    received = Received()
    with Filling(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("fill")
        assert full.wait(HANG)
        exchange = LongExchange(server, connection)
        process.follow(received)
        exchange.end()
        assert received.whole == bytes(WINDOW) + b"more"
        connection.close()


def test_what_is_written_during_an_exchange_follows_new_keys(
    tmp_path: Path, transport: SshTransport, key: Path, delayed: threading.Event
) -> None:
    with Echo(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("echo")
        exchange = LongExchange(server, connection)
        delay(lambda: process.write(b"start\n"), delayed)
        exchange.end()
        assert process.read() == b"start\n"
        connection.close()


def test_a_request_of_the_server_during_an_exchange_is_answered_after_new_keys(
    tmp_path: Path, transport: SshTransport, key: Path, delayed: threading.Event
) -> None:
    """As a keepalive request. sshd would end the connection."""
    with Echo(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("echo")
        exchange = LongExchange(server, connection)
        (theirs,) = server._transports
        request = paramiko.Message()
        request.add_byte(cMSG_GLOBAL_REQUEST)
        request.add_string("keepalive@openssh.com")
        request.add_boolean(True)
        theirs.packetizer.send_message(request)
        assert delayed.wait(HANG)
        exchange.end()
        process.write(b"start\n")
        assert process.read() == b"start\n"
        connection.close()


class Silent(SshServer):
    """Runs no command."""

    def __init__(self, authorized: bytes) -> None:
        super().__init__(authorized)
        self.channels: queue.Queue[paramiko.Channel] = queue.Queue()
        """The channels of commands."""

    def execute(self, channel: paramiko.Channel, command: bytes) -> None:
        self.channels.put(channel)


def test_no_data_follow_the_close_of_a_channel_that_the_server_closes_before_new_keys(
    tmp_path: Path, transport: SshTransport, key: Path, delayed: threading.Event
) -> None:
    """sshd would end the connection with all its channels."""
    with Silent(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("first")
        closed = server.channels.get(timeout=HANG)
        exchange = LongExchange(server, connection)
        delay(lambda: process.write(b"in time"), delayed)
        exchange.end(closed)
        connection.start("another")  # after what came before it on the connection
        # The server ignores what follows the client's close.
        assert closed.recv(100) == b"in time"
        connection.close()


def test_a_connection_that_is_closed_after_a_write_has_sent_the_data(
    tmp_path: Path, transport: SshTransport, key: Path, delayed: threading.Event
) -> None:
    with Silent(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("first")
        channel = server.channels.get(timeout=HANG)
        exchange = LongExchange(server, connection)
        delay_write_and_close(process, connection.close, delayed)
        exchange.end()
        assert channel.recv(100) == b"kill"


def test_connections_that_are_closed_after_a_write_have_sent_the_data_over_a_jump_host(
    tmp_path: Path, transport: SshTransport, key: Path, delayed: threading.Event
) -> None:
    with SshServer(blob(key)) as jump, Silent(blob(key)) as server:
        host = host_of(server, key, tmp_path)
        with (tmp_path / "known").open("a") as known:
            known.write(jump.host_key_line)
        via = f"127.0.0.1:{jump.port}"
        process = transport.connect(replace(host, ssh=replace(host.ssh, jump=via))).start("first")
        channel = server.channels.get(timeout=HANG)
        ((_, connection),) = transport._jumps.items()
        exchange = LongExchange(jump, connection.result())  # type: ignore[arg-type]
        delay_write_and_close(process, transport.close, delayed)
        exchange.end()
        assert channel.recv(100) == b"kill"


@pytest.mark.parametrize("who", ["server", "client"])
def test_a_write_ends_if_the_connection_is_closed_during_an_exchange(
    who: str, tmp_path: Path, transport: SshTransport, key: Path, delayed: threading.Event
) -> None:
    with Silent(blob(key)) as server:
        connection = transport.connect(host_of(server, key, tmp_path))
        process = connection.start("first")
        exchange = LongExchange(server, connection)
        writer = delay(lambda: process.write(b"kill"), delayed)
        connection.close() if who == "client" else server._transports[0].close()
        writer.join(HANG)
        assert not writer.is_alive()
        with pytest.raises(ConnectError):
            process.write(b"more")
        exchange.end()


@pytest.mark.sshd
def test_data_that_come_too_late_for_a_channel_do_not_end_the_connection(
    tmp_path: Path, transport: SshTransport
) -> None:
    with running_sshd(tmp_path / "server") as sshd:
        connection = transport.connect(host_on(sshd, "gpu01"))
        for _ in range(2):  # sshd reuses the number of a channel
            process = connection.start("true")
            assert process.read() == b""
            assert process.wait(HANG) == 0
            process.close()
            # A thread may check that the channel is open, and send its data later.
            late = paramiko.Message()
            late.add_byte(cMSG_CHANNEL_DATA)
            late.add_int(process._channel.remote_chanid)
            late.add_string(b"late")
            connection._transport._send_user_message(late)
        process = connection.start("cat")
        process.write(b"in time")
        process.close_stdin()
        assert process.read() == b"in time"
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
