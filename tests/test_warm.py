"""The server from which tests fork their processes."""

from __future__ import annotations

import os
import select
import signal
import socket
from pathlib import Path

import pytest

from support.limits import HANG
from support.other_users import MALLORY, acting_as
from support.warm import Server

SCRIPT = """\
import os
fields = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()
print(fields[1])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """It prints the process ID of its server."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


def server_of(server: Server, script: Path) -> int:
    output, _ = server.start(script, environment=os.environ).communicate(HANG)
    return int(output)


def test_all_workers_share_a_server_until_it_ends(script: Path) -> None:
    first, second = Server("colorsys"), Server("colorsys")
    pid = server_of(first, script)
    assert server_of(second, script) == pid
    end = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([end], [], [], HANG)[0]
    os.close(end)
    assert server_of(Server("colorsys"), script) != pid


def test_other_users_get_no_process() -> None:
    server = Server("calendar")
    with acting_as(MALLORY):
        with pytest.raises(PermissionError, match="another user"):
            Server("calendar")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.settimeout(HANG)
            other.connect(server.address)
            assert other.recv(1) == b""
