"""Selecting a host's transport without loading unneeded modules."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from dtrain.diagnostics import AuthError
from dtrain.spec.model import Host
from dtrain.transport.select import Transports
from dtrain.transport.ssh import SshTransport
from support.limits import until
from support.sshd import Sshd, host_on, running_sshd


def test_local_hosts_never_load_paramiko() -> None:
    code = """
import sys
from pathlib import Path
from dtrain.spec.model import Host
from dtrain.transport.select import Transports
transports = Transports(Path("."))
here = Host("here", "127.0.0.1", transport="local")
transports.prepare([here])
connection = transports.connect(here)
print(connection.start("exit 3").wait(), "paramiko" in sys.modules)
transports.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "3 False\n"


LIMITED = """
import resource, sys
from pathlib import Path
from dtrain.diagnostics import LimitError
from dtrain.spec.model import Host
from dtrain.transport.select import Transports
hard = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(40, hard), hard))
try:
    Transports(Path(".")).prepare([Host("here", "127.0.0.1", transport="local")] * 100)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except LimitError as error:
    print(error.message)
"""


@pytest.mark.parametrize(
    ("hard", "printed"),
    [
        (1000, "656"),
        (500, "500"),
        (130, "this machine lets dtrain open 130 files, but it needs at least 131"),
    ],
)
def test_each_host_may_have_open_files(hard: int, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(hard)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(printed)


@pytest.mark.sshd
def test_each_host_gets_its_own_transport(sshd: Sshd, tmp_path: Path) -> None:
    transports = Transports(tmp_path)
    for host in (Host("here", "127.0.0.1", transport="local"), host_on(sshd)):
        connection = transports.connect(host)
        process = connection.start("printenv SSH_CONNECTION")
        assert bool(process.read()) == (host.transport == "ssh")
        connection.close()
    transports.close()


@pytest.mark.sshd
def test_an_early_connection_is_used_once_and_closed_if_nobody_uses_it(tmp_path: Path) -> None:
    with running_sshd(tmp_path) as sshd, closing(Transports(tmp_path)) as transports:
        hosts = [host_on(sshd, name) for name in ("used", "unused")]
        transports.connect_early([*hosts, Host("here", "127.0.0.1", transport="local")])
        sshd.wait_for_log(r"(?s)Accepted publickey.*Accepted publickey")
        with closing(transports.connect(hosts[0])) as early:
            assert early.start("echo works").read() == b"works\n"
        assert sshd.log().count("Accepted publickey") == 2
        with closing(transports.connect(hosts[0])) as another:
            assert another.start("echo again").read() == b"again\n"
        assert sshd.log().count("Accepted publickey") == 3
        transports.close()
        sshd.wait_for_log(r"(?s)(Closing connection to.*){3}")


@pytest.mark.sshd
def test_an_early_connection_that_has_broken_is_replaced(tmp_path: Path) -> None:
    with running_sshd(tmp_path) as sshd, closing(SshTransport(tmp_path)) as transport:
        host = host_on(sshd)
        transport.connect_early([host])
        early = transport._early[host.name].result()
        sshd.end_sessions()
        until(lambda: not early.alive)
        with closing(transport.connect(host)) as another:
            assert another.start("echo works").read() == b"works\n"


@pytest.mark.sshd
def test_an_early_connection_that_fails_says_why(sshd: Sshd, tmp_path: Path) -> None:
    with closing(Transports(tmp_path)) as transports:
        host = host_on(sshd, user="nobody-at-all")
        transports.connect_early([host])
        with pytest.raises(AuthError, match="nobody-at-all"):
            transports.connect(host)
