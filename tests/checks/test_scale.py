"""The cost of a check: one connection per host, for any number of hosts."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import Cluster
from dtrain.launchplan.build import build
from dtrain.session.facts.host_connections import HostConnections
from dtrain.session.facts.preflight import Preflight
from dtrain.transport.select import Transports
from support.cluster import Launcher, job
from support.limits import HANG, until
from support.specs import read

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]
FAKE = str(Path(__file__).parent / "fakes" / "torch-2.13.0")
JOB = {"framework": "torch", "script": job("echo_env.py"), "env": {"PYTHONPATH": FAKE}}


def logins(cluster: Cluster) -> list[int]:
    """The number of logins on each host."""
    return [
        (host.folder / "sshd.log").read_text().count("Accepted publickey") for host in cluster.hosts
    ]


def test_24_hosts_on_one_connection_each(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(24)
    done = launcher.command("check", str(launcher.file(cluster, JOB))).wait(HANG)
    assert done.code == 0, done
    assert "24 hosts checked" in done.stdout
    assert "no problems found" in done.stdout
    assert logins(cluster) == [1] * 24
    assert launcher.left(cluster) == {}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_processes_of_a_check_end_with_it(
    hosts: Hosts, launcher: Launcher, number: signal.Signals, code: int
) -> None:
    """Also if the launching machine dies during a setup line."""
    cluster = hosts(2)
    file = launcher.file(cluster, {**JOB, "setup": ["echo begun > ~/begun", "sleep 1000"]})
    check = launcher.command("check", str(file))
    waiting = [host.home / "begun" for host in cluster.hosts]
    until(lambda: all(path.exists() for path in waiting), "the setup line on both hosts")
    check.send(number)
    assert check.process.wait() == code
    assert launcher.left(cluster) == {}


def test_a_check_of_hosts_that_are_this_machine(launcher: Launcher) -> None:
    script = launcher.folder / "train.py"
    script.write_text("")
    file = launcher.folder / "local.yaml"
    file.write_text(
        "cluster: {hosts: [here, there], gpus: 0, transport: local}\n"
        f"job: {{framework: torch, script: train.py, env: {{PYTHONPATH: '{FAKE}'}}}}\n"
    )
    done = launcher.command("check", str(file)).wait()
    assert done.code == 0, done
    plan = build(read(file), local_python="python3")
    preflight = Preflight(plan, HostConnections(Transports(file.parent)), base=file.parent)
    preflight.close()  # Closing before any start is allowed.
