"""Connections that fail or are lost: retries and messages."""

from __future__ import annotations

import base64
import errno
import logging
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest

from dtrain import hostlist
from dtrain.diagnostics import ConnectError, HostKeyError
from dtrain.spec.model import Host, Ssh
from dtrain.transport import retry, unanswered
from dtrain.transport.ssh import SshTransport
from dtrain.transport.ssh_transport import MAX_GREETING, BoundedPacketizer
from support.limits import HANG, until
from support.ports import free_port
from support.ssh_server import Login, SshServer
from support.sshd import Sshd, generate_key, host_on, running_sshd


@pytest.fixture
def identity(tmp_path: Path) -> Path:
    return generate_key(tmp_path / "identity")


@pytest.fixture
def host(tmp_path: Path, identity: Path) -> Callable[..., Host]:
    def host(server: SshServer, **ssh: Any) -> Host:
        known = tmp_path / "known"
        known.write_text(server.host_key_line)
        settings = {"identity": str(identity), "known_hosts": str(known), **ssh}
        return Host("gpu01", "127.0.0.1", ssh=Ssh("ml", server.port, **settings))

    return host


@pytest.fixture
def blob(identity: Path) -> bytes:
    return base64.b64decode(Path(f"{identity}.pub").read_text().split()[1])


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """However a connection fails, neither paramiko nor a dying thread writes to the terminal,
    and no message of paramiko reaches the root logger."""
    collector = Collector()
    logging.getLogger().addHandler(collector)
    yield
    logging.getLogger().removeHandler(collector)
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert not collector.records


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


class Dropping(SshServer):
    """Closes the first connections without a greeting, as sshd does past MaxStartups."""

    drops = 3
    words = b""

    def greet(self, stream: socket.socket, number: int) -> bool:
        if number > self.drops:
            return True
        stream.sendall(self.words)
        return False


@pytest.mark.usefixtures("short_pauses")
def test_dropped_connections_are_retried(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    with Dropping(blob) as server:
        connection = transport.connect(host(server))
        assert connection.start("exit 6").wait(HANG) == 6
        assert server.connections == 4
        connection.close()


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize(
    "said",
    [
        b"Exceeded MaxStartups\r\n",
        b"Not allowed at this time\r\n",
        b"SSH-2.0-OpenSSH_10.0\r\n\0\0\4<\t\x14\x8a\x91",  # cut off within its first packet
    ],
)
def test_an_sshd_that_takes_no_connections_for_now_is_retried(
    transport: SshTransport, blob: bytes, host: Callable[..., Host], said: bytes
) -> None:
    class Full(Dropping):
        words = said

    with Full(blob) as server:
        transport.connect(host(server)).close()
        assert server.connections == 4


class BootingUp(Login):
    """Says why it lets nobody in, as sshd does with pam_nologin, and hangs up."""

    def get_banner(self) -> tuple[str, str]:
        return "The system is\r\n\x1b[31mbooting up. " + "Come back later. " * 1000, "en-US"

    def check_auth_none(self, username: str) -> int:
        self.server.drop_connections()
        return paramiko.AUTH_FAILED


def test_what_the_server_says_before_it_hangs_up_is_shown(
    transport: SshTransport,
    blob: bytes,
    host: Callable[..., Host],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry, "pause", lambda *_: None)
    with SshServer(blob) as server, pytest.raises(ConnectError) as caught:
        server.login = BootingUp
        transport.connect(host(server))
    assert "authentication (it said: The system is booting up. Come back" in caught.value.message
    # It may be only a legal notice: the end of the connection is shown, too.
    assert re.search("Come.*; the server closed the connection", caught.value.message)
    assert caught.value.hint.startswith("if what it said is not the reason, check whether `ssh ")
    assert len(caught.value.message) < 500


def test_retries_end_if_the_server_always_drops(
    transport: SshTransport,
    blob: bytes,
    host: Callable[..., Host],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Start with the longest pause, so that the retries end after few attempts.
    monkeypatch.setattr(retry, "pause", lambda kind, attempt, *_: 0.0 if attempt < 4 else None)

    class Never(Dropping):
        drops = 1 << 30

    with Never(blob) as server:
        with pytest.raises(ConnectError) as caught:
            transport.connect(host(server))
        assert server.connections == 4
    error = caught.value
    assert error.message.startswith(
        f"gpu01: connecting to gpu01 (127.0.0.1:{server.port}) as ml: the server closed the "
        "connection during the SSH handshake (4 attempts in "
    )
    assert "MaxStartups" in error.hint
    assert "ml@127.0.0.1` works" in error.hint


class Hanging(SshServer):
    """Sends an SSH greeting and nothing else."""

    words = b"SSH-2.0-hanging\r\n"

    def greet(self, stream: socket.socket, number: int) -> bool:
        with suppress(OSError):  # The client may have disconnected already.
            stream.sendall(self.words)
        self.stopping.wait()
        return False


@pytest.mark.parametrize(
    ("words", "seconds", "reason"),
    [
        # Time for the greeting to arrive on a busy machine.
        (b"SSH-2.0-hanging\r\n", 2.0, "did not finish its SSH handshake within 2 s"),
        (b"", 0.3, "did not greet as SSH does within 0.3 s"),
    ],
)
def test_retries_end_if_the_server_hangs(
    transport: SshTransport,
    blob: bytes,
    host: Callable[..., Host],
    monkeypatch: pytest.MonkeyPatch,
    words: bytes,
    seconds: float,
    reason: str,
) -> None:
    monkeypatch.setattr(retry, "pause", lambda kind, attempt, *_: 0.0 if attempt < 2 else None)
    monkeypatch.setattr(Hanging, "words", words)
    with Hanging(blob) as server:
        with pytest.raises(ConnectError, match=f"{reason} .2 attempts in") as caught:
            transport.connect(host(server, connect_timeout=seconds))
        assert "overloaded" in caught.value.hint
        assert "(MTU): `ping -M do -s 1400 127.0.0.1`" in caught.value.hint


@pytest.mark.parametrize("kind", ["", "the jump host "])
def test_a_host_that_hangs_is_named_early(
    tmp_path: Path,
    blob: bytes,
    host: Callable[..., Host],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(unanswered, "NOTICE_SECONDS", 0.1)
    notices: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Hanging(blob) as server, ThreadPoolExecutor(1) as pool:
        transport = SshTransport(tmp_path, notice=notices.put)
        jump = f"user@127.0.0.1:{server.port}" if kind else None
        connecting = pool.submit(transport.connect, host(server, jump=jump))
        name = "127.0.0.1" if kind else "gpu01"
        expected = f"waiting for {kind}{name} (127.0.0.1:{server.port}) to answer"
        assert notices.get(timeout=HANG) == expected
        transport.close()
        assert isinstance(connecting.exception(HANG), ConnectError)


def test_hosts_that_hang_share_a_notice(
    tmp_path: Path, blob: bytes, host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait when the first one is late."""
    monkeypatch.setattr(unanswered, "NOTICE_SECONDS", 1.0)
    monkeypatch.setattr(unanswered, "TOGETHER", 1.0)
    notices: queue.SimpleQueue[str] = queue.SimpleQueue()
    names = [f"gpu{number:02}" for number in range(1, 5)]
    with Hanging(blob) as server, ThreadPoolExecutor(len(names)) as pool:
        transport = SshTransport(tmp_path, notice=notices.put)
        for name in names:
            pool.submit(transport.connect, replace(host(server), name=name))
        named: list[str] = []
        while len(named) < len(names):
            text = notices.get(timeout=HANG)
            found = re.fullmatch(r"waiting for (\S+)( \(\S+\))? to answer", text)
            assert found, text
            named += hostlist.unfold(found[1])
        assert sorted(named) == names  # each once
        transport.close()


def test_a_server_that_does_not_speak_ssh(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    class Web(SshServer):
        def greet(self, stream: socket.socket, number: int) -> bool:
            stream.recv(100)
            stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            return False

    with Web(blob) as server:
        with pytest.raises(
            ConnectError, match=r"not an SSH server: it sent 'HTTP/1\.1 400"
        ) as caught:
            transport.connect(host(server))
        assert server.connections == 1
        assert "`port`" in caught.value.hint


def test_a_server_of_the_first_protocol(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    class Old(SshServer):
        def greet(self, stream: socket.socket, number: int) -> bool:
            stream.sendall(b"SSH-1.5-OpenSSH_1.2\r\n")
            return False

    with (
        Old(blob) as server,
        pytest.raises(ConnectError, match=r"Incompatible version \(1\.5 instead of 2\.0") as caught,
    ):
        transport.connect(host(server))
    assert "too old" in caught.value.hint


def test_a_wrong_host_key_ends_the_connection_before_authentication(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    offered: list[str] = []

    class Curious(Login):
        def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
            offered.append(username)
            return paramiko.AUTH_SUCCESSFUL

    with SshServer(blob) as server:
        server.login = Curious
        server.host_key, real = paramiko.ECDSAKey.generate(), server.host_key
        impostor, server.host_key = server.host_key, real
        victim = host(server)
        server.host_key = impostor
        with pytest.raises(HostKeyError, match="its host key has changed"):
            transport.connect(victim)
        assert server.connections == 1
        assert not offered


def test_refused_channels_are_explained(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    class Strict(Login):
        def check_channel_request(self, kind: str, chanid: int) -> int:
            return paramiko.OPEN_FAILED_RESOURCE_SHORTAGE

    with SshServer(blob) as server:
        server.login = Strict
        connection = transport.connect(host(server))
        with pytest.raises(ConnectError) as caught:
            connection.start("true")
        assert "starting a command on gpu01" in caught.value.message
        assert "MaxSessions" in caught.value.hint
        connection.close()


def test_refused_commands_are_explained(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    class Strict(Login):
        def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
            return False

    with SshServer(blob) as server:
        server.login = Strict
        connection = transport.connect(host(server))
        with pytest.raises(ConnectError, match="sshd refused to run the command"):
            connection.start("true")
        connection.close()


def test_a_session_that_does_not_open_is_not_called_refused(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    over = threading.Event()

    class Slow(Login):
        def check_channel_request(self, kind: str, chanid: int) -> int:
            over.wait(HANG)
            return super().check_channel_request(kind, chanid)

    with SshServer(blob) as server:
        server.login = Slow
        connection = transport.connect(host(server, connect_timeout=1.0))
        with pytest.raises(ConnectError, match="sshd opened no session within 1 s"):
            connection.start("true")
        over.set()
        connection.close()


def test_a_lost_connection_fails_reads_writes_and_waits(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    with SshServer(blob) as server:
        connection = transport.connect(host(server))
        process = connection.start("echo started; exec cat")
        assert process.read() == b"started\n"
        with ThreadPoolExecutor(3) as pool:
            reading = pool.submit(process.read)
            waiting = pool.submit(process.wait)
            server.drop_connections()
            for future in (reading, waiting):
                with pytest.raises(ConnectError) as caught:
                    future.result(HANG)
                assert f"the connection to 127.0.0.1:{server.port} was lost" in caught.value.reason
        with pytest.raises(ConnectError):
            process.write(b"x")
        with pytest.raises(ConnectError, match="was lost"):
            connection.start("true")
        process.close()
        connection.close()


class Falling(Login):
    """After ``fall silent`` it neither reads nor answers, like a frozen machine whose kernel, or a
    middlebox, still acknowledges packets."""

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        if command == b"fall silent":
            self.server.stopping.wait()
        return super().check_channel_exec_request(channel, command)


@pytest.fixture
def quick(home: Path) -> None:
    (home / ".ssh" / "config").write_text("ServerAliveInterval 1\nServerAliveCountMax 2\n")


@pytest.mark.usefixtures("quick")
def test_readers_detect_a_silent_peer(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    with SshServer(blob) as server:
        server.login = Falling
        connection = transport.connect(host(server))
        process = connection.start("echo started; exec cat")
        assert process.read() == b"started\n"
        with pytest.raises(ConnectError, match="no response for 2 s"):
            connection.start("fall silent")
        with pytest.raises(ConnectError, match="no response for 2 s") as caught:
            process.read()
        assert "the network may lose large packets (MTU): `ping -M do " in caught.value.hint
        connection.close()


@pytest.mark.usefixtures("quick")
def test_blocked_writers_detect_a_silent_peer(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    with SshServer(blob) as server:
        server.login = Falling
        connection = transport.connect(host(server))
        process = connection.start("echo started; exec cat")
        assert process.read() == b"started\n"
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(connection.start, "fall silent")
            with pytest.raises(ConnectError):
                # Steady writes keep paramiko's own keepalive from sending anything.
                while True:
                    process.write(b"x" * 1000)
            with pytest.raises(ConnectError):
                starting.result(HANG)
        connection.close()


@pytest.mark.sshd
def test_an_idle_peer_stays_connected(transport: SshTransport, sshd: Sshd, home: Path) -> None:
    # Time for a busy machine to answer.
    (home / ".ssh" / "config").write_text("ServerAliveInterval 1\nServerAliveCountMax 4\n")
    connection = transport.connect(host_on(sshd))
    process = connection.start("sleep 6; echo done")
    assert process.read() == b"done\n"
    assert process.wait(HANG) == 0
    connection.close()


@pytest.mark.sshd
def test_thirty_hosts_at_once_on_an_sshd_that_drops_from_three_on(
    transport: SshTransport, tmp_path: Path
) -> None:
    with running_sshd(tmp_path, settings={"MaxStartups": "3:100:10"}) as sshd:
        hosts = [host_on(sshd, f"gpu{n:02}") for n in range(30)]
        with ThreadPoolExecutor(30) as pool:
            for connection in pool.map(transport.connect, hosts):
                connection.close()
        until(lambda: len(re.findall("Accepted publickey", sshd.log())) == 30, "30 logins")
        sshd.wait_for_log("drop connection")


@pytest.mark.sshd
def test_an_ipv6_host(transport: SshTransport, tmp_path: Path) -> None:
    with running_sshd(tmp_path, address="::1") as sshd:
        connection = transport.connect(host_on(sshd))
        assert connection.start("exit 8").wait(HANG) == 8
        connection.close()
        with pytest.raises(HostKeyError) as caught:
            transport.connect(host_on(sshd, known_hosts="none"))
        assert f"connecting to gpu01 ([::1]:{sshd.port})" in caught.value.message


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_refused_connection_is_not_retried(transport: SshTransport, address: str) -> None:
    port = free_port(address)
    with pytest.raises(ConnectError) as caught:
        transport.connect(Host("gpu01", address, ssh=Ssh("ml", port)))
    assert caught.value.reason == "connection refused"
    assert f"port {port}" in caught.value.hint
    assert "`transport: local`" in caught.value.hint


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EAFNOSUPPORT, "address family not supported by protocol"),  # a kernel without IPv6
        (errno.EMFILE, "this machine lets dtrain open no more files"),
    ],
)
def test_a_socket_that_the_kernel_does_not_make(
    transport: SshTransport, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    class Refused(socket.socket):
        def __init__(self, *_: object) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", Refused)
    with pytest.raises(ConnectError) as caught:
        transport.connect(Host("gpu01", "::1", ssh=Ssh("ml", 22)))
    assert caught.value.reason == reason


def test_an_address_that_the_kernel_lacks_does_not_hide_what_another_says(
    transport: SshTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoIpv6(socket.socket):
        def __init__(self, family: int = -1, *other: int, **by_name: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
            super().__init__(family, *other, **by_name)

    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    resolved = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", port, 0, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: resolved)
    monkeypatch.setattr(socket, "socket", NoIpv6)
    with pytest.raises(ConnectError) as caught:
        transport.connect(Host("gpu01", "gpu01", ssh=Ssh("ml", port)))
    assert caught.value.reason == "connection refused"


def test_a_name_that_does_not_exist(transport: SshTransport) -> None:
    with pytest.raises(ConnectError) as caught:
        transport.connect(Host("gpu01", "gpu01.invalid", ssh=Ssh("ml")))
    assert "cannot resolve the name 'gpu01.invalid'" in caught.value.reason
    assert "`address`" in caught.value.hint


def test_a_host_that_does_not_answer(transport: SshTransport) -> None:
    # The backlog of one is full: further connections get no answer.
    with socket.socket() as listener, socket.socket() as first, socket.socket() as second:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for filler in (first, second):
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        port = listener.getsockname()[1]
        with pytest.raises(ConnectError, match="no answer within 1 s") as caught:
            transport.connect(Host("gpu01", "127.0.0.1", ssh=Ssh("ml", port, connect_timeout=1.0)))
        assert "firewall" in caught.value.hint


def test_closing_the_transport_ends_a_hanging_handshake(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    class Waiting(Hanging):
        def __init__(self, authorized: bytes) -> None:
            super().__init__(authorized)
            self.reached = threading.Event()

        def greet(self, stream: socket.socket, number: int) -> bool:
            self.reached.set()
            return super().greet(stream, number)

    with Waiting(blob) as server, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(transport.connect, host(server, connect_timeout=600.0))
        assert server.reached.wait(HANG)
        transport.close()
        with pytest.raises(ConnectError):
            connecting.result(HANG)


@pytest.mark.usefixtures("short_pauses")
def test_closing_the_transport_ends_waiting_attempts(
    transport: SshTransport, blob: bytes, host: Callable[..., Host]
) -> None:
    dropped = threading.Event()

    class Never(SshServer):
        def greet(self, stream: socket.socket, number: int) -> bool:
            if number == 3:
                dropped.set()
            return False

    with Never(blob) as server, ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(transport.connect, host(server))
        assert dropped.wait(HANG)
        transport.close()
        with pytest.raises(ConnectError):
            connecting.result(HANG)


def test_a_failed_handshake_does_not_delay_the_interpreters_exit(
    tmp_path: Path, blob: bytes, host: Callable[..., Host]
) -> None:
    """paramiko itself would leave a timer that runs for its handshake timeout."""
    with SshServer(blob) as server:
        code = f"""
from pathlib import Path
from dtrain.diagnostics import HostKeyError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.ssh import SshTransport
try:
    SshTransport(Path("/")).connect(
        Host("gpu01", "127.0.0.1", ssh=Ssh("ml", {server.port}, connect_timeout=600.0)))
except HostKeyError as error:
    print("refused")
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=HANG, env=dict(os.environ)
        )
    assert (done.stdout, done.stderr) == (b"refused\n", b"")


def test_a_packet_longer_than_any_of_openssh(
    transport: SshTransport, host: Callable[..., Host], blob: bytes
) -> None:
    """paramiko would read 4 GiB of it into memory."""
    with SshServer(blob) as server:
        process = transport.connect(host(server)).start("exec cat")
        (served,) = server._transports
        packet = paramiko.Message()
        packet.add_byte(b"\x02")  # SSH_MSG_IGNORE
        packet.add_string("x" * 10_000_000)
        with suppress(EOFError):
            served._send_user_message(packet)
        with pytest.raises(ConnectError, match="the server sent a packet of over 262144 bytes"):
            process.read()


def test_a_greeting_without_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(HANG)
        sender = threading.Thread(target=theirs.sendall, args=(b"x" * (MAX_GREETING + 1),))
        sender.start()
        with pytest.raises(paramiko.SSHException, match="greeting does not end"):
            BoundedPacketizer(ours).readline(HANG)
        sender.join()
