"""Jump hosts over an open connection of `ssh` (ControlMaster): dtrain does not log in again."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtrain.diagnostics import AuthError, ConnectError
from dtrain.spec.model import Host
from dtrain.transport import control_master
from dtrain.transport.ssh import SshTransport
from support.limits import HANG
from support.other_users import MALLORY, acting_as
from support.ports import free_port
from support.sshd import Sshd, host_on

pytestmark = pytest.mark.sshd


@pytest.fixture
def control_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c") / "s"


@pytest.fixture
def host(tmp_path: Path, sshd: Sshd, bastion: Sshd, control_path: Path) -> Host:
    known = tmp_path / "known"
    known.write_text(sshd.known_hosts.read_text() + bastion.known_hosts.read_text())
    config = tmp_path / "config"
    config.write_text(f"Match originalhost 127.0.0.1\n  ControlPath {control_path}\n")
    jump = f"{bastion.user}@127.0.0.1:{bastion.port}"
    return host_on(sshd, known_hosts=str(known), config=str(config), jump=jump)


@pytest.fixture
def master(bastion: Sshd, control_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An `ssh` that is logged in to the bastion. New logins there fail."""
    options = [
        f"ControlPath={control_path}",
        f"UserKnownHostsFile={bastion.known_hosts}",
        "PermitLocalCommand=yes",
        "LocalCommand=echo ready",
    ]
    words = [word for option in options for word in ("-o", option)]
    command = ["ssh", "-F", "none", "-M", "-N", *words, "-i", str(bastion.identity)]
    command += ["-p", str(bastion.port), f"{bastion.user}@127.0.0.1"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        bastion.authorized_keys.write_text("")
        yield process
        process.kill()


def test_hosts_are_reached_through_the_open_connection(
    transport: SshTransport,
    host: Host,
    master: subprocess.Popen[bytes],
    notices: list[str],
    control_path: Path,
) -> None:
    with ThreadPoolExecutor(6) as pool:
        connections = list(pool.map(transport.connect, [host] * 6))
    process = connections[0].start("head -c 3000000 /dev/zero")
    received = 0
    while piece := process.read():
        received += len(piece)
    assert received == 3_000_000
    for number, connection in enumerate(connections):
        assert connection.start(f"exit {number}").wait(HANG) == number
        connection.close()
    assert notices == [f"127.0.0.1: using the connection that ssh holds open ({control_path})"]
    transport.close()
    assert master.poll() is None  # The connection belongs to the user's ssh.


def test_the_end_of_the_open_connection_is_detected(
    transport: SshTransport, host: Host, master: subprocess.Popen[bytes]
) -> None:
    process = transport.connect(host).start("echo started; exec cat")
    assert process.read() == b"started\n"
    master.kill()
    with pytest.raises(ConnectError, match="was lost"):
        process.read()
    master.wait()
    # dtrain then connects to the bastion itself, which refuses.
    with pytest.raises(AuthError, match="it refused every key"):
        transport.connect(host)


def test_an_address_that_the_jump_host_cannot_reach(
    transport: SshTransport, host: Host, master: subprocess.Popen[bytes], sshd: Sshd
) -> None:
    port = free_port()
    closed = host_on(
        sshd,
        port=port,
        known_hosts=host.ssh.known_hosts,
        config=host.ssh.config,
        jump=host.ssh.jump,
    )
    with pytest.raises(ConnectError, match=f"cannot reach 127.0.0.1:{port}"):
        transport.connect(closed)


HELLO = struct.pack(">III", 8, 1, 4)


@pytest.mark.parametrize(
    "kind",
    ["missing", "file", "stale", "garbage", "hangs up", "link", "drip", "another user's process"],
)
def test_a_socket_of_another_program_is_ignored(
    transport: SshTransport,
    host: Host,
    control_path: Path,
    bastion: Sshd,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_master, "HELLO_TIMEOUT", 2.0)
    listener = socket.socket(socket.AF_UNIX)
    answers = {"garbage": b"\xff" * 64, "hangs up": b"", "drip": struct.pack(">I", 1 << 18)}
    answer = answers.get(kind, HELLO if kind in {"link", "another user's process"} else None)
    over = threading.Event()

    def serve() -> None:
        while True:
            try:
                with listener.accept()[0] as client:
                    client.sendall(answer or b"")
                    while kind == "drip" and not over.wait(0.1):
                        client.send(b"\0")
            except ConnectionError:
                continue  # this client gave up
            except OSError:
                return

    if kind == "file":
        control_path.write_text("")
    elif kind == "link":
        listener.bind(f"{control_path}.real")
        control_path.symlink_to(f"{control_path}.real")
    elif kind != "missing":
        listener.bind(str(control_path))
    if kind == "another user's process":
        if os.getuid() != 0:
            pytest.skip("needs root to act as another user")
        with acting_as(MALLORY):  # the kernel notes who calls listen
            listener.listen()
    elif answer is not None:
        listener.listen()
    if answer is not None:
        threading.Thread(target=serve, daemon=True).start()
    transport.connect(host).close()
    bastion.wait_for_log("Accepted publickey")
    over.set()
    listener.close()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a socket away")
def test_another_users_socket_is_not_used(
    transport: SshTransport,
    host: Host,
    master: subprocess.Popen[bytes],
    control_path: Path,
) -> None:
    os.chown(control_path, 65534, 65534)
    with pytest.raises(AuthError):
        transport.connect(host)
