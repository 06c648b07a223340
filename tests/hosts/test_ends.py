"""After any end of a launch, no process is left on any host."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.limits import HANG

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]


@pytest.mark.torch
def test_a_failure_on_one_of_four_hosts(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(4)
    file = launcher.file(
        cluster, {"framework": "torch", "script": job("fail.py"), "args": ["2", "raise"]}
    )
    launch = launcher.start(file, "--no-check")
    launch.until("stopping the other workers", timeout=HANG)
    assert launcher.left(cluster) == {}
    done = launch.wait()
    assert done.code == 1
    report = done.stderr[done.stderr.index("\nerror: ") + 1 :]
    assert report.startswith("error: rank 2 on node3 exited with status 1\n")
    assert report.index("ValueError: bad batch on rank 2") < 2000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals(hosts: Hosts, launcher: Launcher, number: signal.Signals) -> None:
    cluster = hosts(4)
    file = launcher.file(
        cluster, {"framework": "torch", "script": job("zombies.py"), "grace": "1s"}
    )
    launch = launcher.start(file)
    launch.until("lingering", count=4)
    launch.send(number)
    assert launch.wait().code == 130
    assert launcher.left(cluster) == {}


def test_a_broken_pipe(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(
        cluster, {"framework": "torch", "script": job("lines.py"), "args": ["~/n", "99999999"]}
    )
    head = subprocess.Popen(["head", "-n", "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert head.stdin and head.stdout
    launch = launcher.start(file, stdout=head.stdin)
    head.stdin.close()
    assert len(head.stdout.readlines()) == 2
    head.wait()
    assert launch.wait().code == 130
    assert launcher.left(cluster) == {}


def test_two_runs_on_the_same_hosts(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    waiting = {"framework": "torch", "script": job("zombies.py"), "grace": "1s"}
    file = launcher.file(cluster, waiting)
    one, two = launcher.start(file), launcher.start(file)
    one.until("lingering", count=2)
    two.until("lingering", count=2)
    one.send(signal.SIGINT)
    assert one.wait().code == 130
    alive = [line for found in cluster.hosts for line in found.processes().values()]
    # Each of two hosts has the worker and the three processes that it left behind.
    assert len([line for line in alive if "zombies.py" in line]) == 8
    two.send(signal.SIGINT)
    assert two.wait().code == 130
    assert launcher.left(cluster) == {}


def test_a_detached_worker_is_swept(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(
        cluster, {"framework": "torch", "script": job("zombies.py"), "args": ["exit"]}
    )
    assert launcher.run(file).code == 0
    assert launcher.left(cluster) == {}


def test_a_short_cut_of_the_network_loses_nothing(hosts: Hosts, launcher: Launcher) -> None:
    """The connection is reset in mid-stream. The next relay continues at the last byte."""
    cluster = hosts(2)
    file = launcher.file(
        cluster, {"framework": "torch", "script": job("lines.py"), "args": ["~/n", "40000", "8000"]}
    )
    launch = launcher.start(file)
    launch.until("out 1 000004000")
    cluster["node2"].run("pkill", "-KILL", "-f", "sshd: root")
    for host in cluster.hosts:
        (host.home / "n" / "go").touch()
    done = launch.wait(HANG)
    assert done.code == 0, str(done)
    lines = launcher.log("node2", "worker-1.out").split(b"\n")
    numbered = [line for line in lines if line.startswith(b"out 1 ")]
    assert numbered == [b"out 1 %09d abcdefghij" % number for number in range(40000)]
    assert launcher.left(cluster) == {}


def test_a_host_that_loses_power(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(cluster, {"framework": "torch", "script": job("zombies.py")})
    launch = launcher.start(file)
    launch.until("lingering", count=2)
    cluster["node2"].run("pkill", "-KILL", "-f", "dtrain-supervisor")
    done = launch.wait(HANG)
    assert done.code == 3, done
    assert "node2: running the job: the supervisor died" in done.stderr
    assert launcher.left(cluster) == {}
