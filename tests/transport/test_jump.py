"""Jump hosts: chains of real sshds, one shared connection each."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtrain.diagnostics import AuthError, ConnectError, HostKeyError
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.ssh import SshTransport
from dtrain.transport.ssh_connection import SshConnection
from support.limits import HANG
from support.ports import free_port
from support.sshd import Sshd, generate_key, host_on, running_sshd

pytestmark = pytest.mark.sshd


@pytest.fixture
def known(tmp_path: Path, sshd: Sshd, bastion: Sshd) -> str:
    path = tmp_path / "known"
    path.write_text(sshd.known_hosts.read_text() + bastion.known_hosts.read_text())
    return str(path)


def logs_in(sshd: Sshd, times: int = 1) -> bool:
    """Whether its log has so many logins in the end. What it writes arrives late."""
    sshd.wait_for_log(rf"(?s)(Accepted publickey.*){{{times}}}")
    return len(re.findall(r"Accepted publickey", sshd.log())) == times


def spec(sshd: Sshd) -> str:
    return f"{sshd.user}@127.0.0.1:{sshd.port}"


def test_many_hosts_share_one_connection_to_the_jump_host(
    transport: SshTransport, sshd: Sshd, bastion: Sshd, known: str
) -> None:
    hosts = [host_on(sshd, f"gpu{n:02}", known_hosts=known, jump=spec(bastion)) for n in range(12)]
    with ThreadPoolExecutor(12) as pool:
        connections = list(pool.map(transport.connect, hosts))
    for number, connection in enumerate(connections):
        assert connection.start(f"exit {number}").wait(HANG) == number
    assert logs_in(bastion)
    for connection in connections:
        connection.close()


def test_a_chain_of_two(
    transport: SshTransport, sshd: Sshd, bastion: Sshd, known: str, tmp_path: Path
) -> None:
    with running_sshd(tmp_path, name="inner", identity=sshd.identity) as inner:
        Path(known).write_text(Path(known).read_text() + inner.known_hosts.read_text())
        host = host_on(sshd, known_hosts=known, jump=f"{spec(bastion)},{spec(inner)}")
        connection = transport.connect(host)
        process = connection.start("head -c 3000000 /dev/zero")
        received = 0
        while piece := process.read():
            received += len(piece)
        assert received == 3_000_000
        assert logs_in(bastion) and logs_in(inner)
        connection.close()


def test_the_jump_host_comes_from_the_configuration(
    transport: SshTransport, sshd: Sshd, bastion: Sshd, home: Path, known: str
) -> None:
    (home / ".ssh" / "config").write_text(
        f"""
        Host bastion
            HostName 127.0.0.1
            Port {bastion.port}
            User {bastion.user}
            IdentityFile {bastion.identity}
            UserKnownHostsFile {known}
        Host gpu*
            ProxyJump bastion
            UserKnownHostsFile {known}
        """
    )
    transport.connect(host_on(sshd, known_hosts=None)).close()
    assert logs_in(bastion)


def test_a_jump_connection_that_opens_after_the_end_is_closed(
    make_transport: Callable[..., SshTransport],
    sshd: Sshd,
    bastion: Sshd,
    known: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[SshConnection] = []
    begun, go = threading.Event(), threading.Event()

    def reach_slowly(self: SshTransport, endpoint: Endpoint) -> SshConnection:
        connection = reach(self, endpoint)
        if endpoint.is_jump:
            opened.append(connection)
            begun.set()
            assert go.wait(HANG)
        return connection

    reach = SshTransport._reach
    monkeypatch.setattr(SshTransport, "_reach", reach_slowly)
    transport = make_transport()
    with ThreadPoolExecutor() as pool:
        host = host_on(sshd, known_hosts=known, jump=spec(bastion))
        connecting = pool.submit(transport.connect, host)
        assert begun.wait(HANG)
        transport.close()
        go.set()
        with pytest.raises(ConnectError):
            connecting.result()
    assert opened[0].closed


def test_a_lost_jump_connection_is_opened_again(
    transport: SshTransport, sshd: Sshd, bastion: Sshd, known: str
) -> None:
    host = host_on(sshd, known_hosts=known, jump=spec(bastion))
    first = transport.connect(host)
    reader = first.start("echo started; exec cat")
    assert reader.read() == b"started\n"
    assert logs_in(bastion)
    pids = re.findall(r"User child is on pid (\d+)", bastion.log())
    # For root, sshd runs the session in the process that authenticated.
    for pid in pids or re.findall(r"Starting session.*?pid (\d+)", bastion.log()):
        os.kill(int(pid), signal.SIGKILL)
    if not pids:
        for child in _children(bastion.process.pid):
            os.kill(child, signal.SIGKILL)
    with pytest.raises(ConnectError, match="was lost"):
        reader.read()
    second = transport.connect(host)
    assert second.start("exit 4").wait(HANG) == 4
    assert logs_in(bastion, 2)
    second.close()


def test_an_unknown_jump_host_key_is_refused(
    transport: SshTransport, sshd: Sshd, bastion: Sshd
) -> None:
    hosts = [host_on(sshd, name, jump=spec(bastion)) for name in ("gpu01", "gpu02")]
    for host in hosts:
        with pytest.raises(HostKeyError) as caught:
            transport.connect(host)
        assert caught.value.host == host.name
        assert "cannot reach its jump host" in caught.value.reason
        assert "its host key is unknown" in caught.value.reason
        assert "via 127.0.0.1: " in caught.value.message
        assert f"-p {bastion.port}" in caught.value.hint


def test_a_jump_host_that_refuses_the_key(
    transport: SshTransport, sshd: Sshd, bastion: Sshd, known: str, tmp_path: Path
) -> None:
    bastion.authorized_keys.write_text(Path(f"{generate_key(tmp_path / 'x')}.pub").read_text())
    hosts = [host_on(sshd, f"gpu{n}", known_hosts=known, jump=spec(bastion)) for n in range(6)]

    def connect(number: int) -> AuthError:
        with pytest.raises(AuthError) as caught:
            transport.connect(hosts[number])
        return caught.value

    with ThreadPoolExecutor(6) as pool:
        errors = list(pool.map(connect, range(6)))
    assert [error.host for error in errors] == [host.name for host in hosts]
    assert all("it refused every key" in error.reason for error in errors)


def test_a_jump_host_that_cannot_reach_the_host(
    transport: SshTransport, sshd: Sshd, bastion: Sshd, known: str
) -> None:
    port = free_port()
    host = host_on(sshd, known_hosts=known, jump=spec(bastion), port=port)
    with pytest.raises(ConnectError) as caught:
        transport.connect(host)
    assert f"jump host 127.0.0.1 cannot reach 127.0.0.1:{port}" in caught.value.reason
    assert f"nc -vz 127.0.0.1 {port}" in caught.value.hint


@pytest.mark.parametrize("place", ["127.0.0.1:{port}", "bastion.invalid", "255.255.255.255"])
def test_a_jump_host_that_cannot_be_reached(
    transport: SshTransport, sshd: Sshd, known: str, place: str
) -> None:
    """The keys of a host do not apply to its jump host."""
    host = host_on(sshd, known_hosts=known, jump=place.format(port=free_port()))
    with pytest.raises(ConnectError, match="cannot reach its jump host") as caught:
        transport.connect(host)
    for key in ("`ssh.port`", "`address`", "set `jump`"):
        assert key not in caught.value.hint


def test_a_jump_host_that_forwards_nothing(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    settings = {"AllowTcpForwarding": "no"}
    with running_sshd(tmp_path, identity=sshd.identity, settings=settings) as closed:
        known = tmp_path / "known"
        known.write_text(sshd.known_hosts.read_text() + closed.known_hosts.read_text())
        host = host_on(sshd, known_hosts=str(known), jump=spec(closed))
        with pytest.raises(ConnectError, match="does not forward connections") as caught:
            transport.connect(host)
        assert "AllowTcpForwarding" in caught.value.hint


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
