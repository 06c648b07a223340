"""ssh's ProxyCommand: programs as connections."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.transport import proxy_command
from dtrain.transport.ssh import SshTransport
from support.limits import HANG
from support.sshd import Sshd, host_on

pytestmark = pytest.mark.sshd

RELAY = """
import os, socket, sys, threading
open(sys.argv[1], "w").write(str(os.getpid()))
server = socket.create_connection((sys.argv[2], int(sys.argv[3])))
def upwards():
    while data := os.read(0, 65536):
        server.sendall(data)
    server.shutdown(socket.SHUT_WR)
threading.Thread(target=upwards, daemon=True).start()
while data := server.recv(65536):
    os.write(1, data)
"""


@pytest.fixture
def relay(tmp_path: Path, home: Path) -> Path:
    """Configures a relay as the ProxyCommand. Returns the file with its process id."""
    script, pid = tmp_path / "relay.py", tmp_path / "pid"
    script.write_text(RELAY)
    command = f"'{sys.executable}' {script} {pid} %h %p"
    (home / ".ssh" / "config").write_text(f"Host gpu01\n  ProxyCommand {command}\n")
    return pid


def ends(pid: int) -> bool:
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                time.sleep(0.01)
                continue
        return True
    return False


def test_a_connection_runs_through_the_program(
    transport: SshTransport, sshd: Sshd, relay: Path
) -> None:
    connection = transport.connect(host_on(sshd))
    process = connection.start("cat")
    data = os.urandom(1 << 20)
    process.write(data)
    process.close_stdin()
    received = b""
    while piece := process.read():
        received += piece
    assert received == data
    pid = int(relay.read_text())
    os.kill(pid, 0)
    connection.close()
    assert ends(pid)


def test_the_shell_is_that_of_the_user(
    transport: SshTransport, sshd: Sshd, home: Path, relay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands may need bash: a common one takes the gateway out of the name with `<<<`."""
    config = home / ".ssh" / "config"
    config.write_text(config.read_text().replace("%h", "$(cat <<<%h)"))
    monkeypatch.setenv("SHELL", "/bin/bash")
    connection = transport.connect(host_on(sshd))
    assert connection.start("true").wait(HANG) == 0


def test_a_program_that_dies_breaks_the_connection(
    transport: SshTransport, sshd: Sshd, relay: Path
) -> None:
    connection = transport.connect(host_on(sshd))
    process = connection.start("echo started; exec cat")
    assert process.read() == b"started\n"
    os.kill(int(relay.read_text()), 9)
    with pytest.raises(ConnectError, match="was lost"):
        process.read()
    connection.close()


def test_the_error_contains_the_stderr_of_the_program(
    transport: SshTransport, sshd: Sshd, home: Path
) -> None:
    warning = "** WARNING: connection is not using a post-quantum key exchange algorithm."
    script = f'echo "{warning}" >&2; echo tunnel to %h:%p is shut >&2; exit 5'
    text = f"ProxyCommand sh -c '{script}'\n"
    (home / ".ssh" / "config").write_text(text)
    with pytest.raises(ConnectError) as caught:
        transport.connect(host_on(sshd))
    assert "through its ProxyCommand: " in caught.value.message
    assert f"exited with status 5: tunnel to 127.0.0.1:{sshd.port} is shut" in caught.value.reason
    assert "ProxyCommand=sh -c" in caught.value.hint


def test_an_ssh_that_was_dropped_is_started_again(
    transport: SshTransport, sshd: Sshd, relay: Path, home: Path, tmp_path: Path
) -> None:
    config = home / ".ssh" / "config"
    _, _, command = config.read_text().strip().partition("ProxyCommand ")
    script = tmp_path / "sometimes"
    relay_command = command.replace("%h %p", '"$@"')
    script.write_text(
        f"test -e {tmp_path}/second || {{ : >{tmp_path}/second; exit 255; }}\n"
        f"exec {relay_command}\n"
    )
    config.write_text(f"ProxyCommand sh {script} %h %p\n")
    transport.connect(host_on(sshd)).close()


def test_a_program_that_stays_silent_is_ended(
    transport: SshTransport,
    sshd: Sshd,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_command, "KILL_AFTER", 0.1)
    pid = tmp_path / "pid"
    text = f"ProxyCommand sh -c 'trap \"\" TERM; echo $$ >{pid}; exec sleep 500'\n"
    (home / ".ssh" / "config").write_text(text)
    with pytest.raises(ConnectError, match="is still running"):
        transport.connect(host_on(sshd, connect_timeout=8.0))
    assert ends(int(pid.read_text()))
