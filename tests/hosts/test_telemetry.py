"""What hosts measure reaches the run's folder, also while no launcher is connected."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import Cluster
from dtrain.runs import telemetry
from namespace_host import Host
from support.cluster import Launcher, job
from support.limits import until
from support.runs import averages

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]

LISTENS = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}
"""The state of a socket that takes connections or datagrams, by the kernel's table."""
RECORDING = "0, 00000000:17:00.0, %d, 70144, 81559, 612, 700, 64, 1980, 1980, 0x04, 0, 61, 2619, 0"
WAIT = "import os, time\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.05)\n"


def ports(host: Host) -> set[int]:
    """The ports of a host on which any process listens."""
    found = set()
    for table, state in LISTENS.items():
        for row in Path(f"/proc/{host.pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, there = row.split()[:4]
            if there == state:
                found.add(int(local.rpartition(":")[2], 16))
    return found


def test_attach_gets_what_was_measured_without_a_launcher(
    hosts: Hosts, launcher: Launcher, tmp_path: Path
) -> None:
    for number, use in enumerate((97, 31), 1):
        tool = tmp_path / f"node{number}" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(f"#!/bin/sh\nwhile echo '{RECORDING % use}'; do sleep 0.5; done\n")
        tool.chmod(0o755)
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    job = {
        "framework": "none",
        "script": str(script),
        "setup": [f'export PATH="{tmp_path}/$DTRAIN_HOST:$PATH"'],
        "env": {"GO": str(tmp_path / "go")},
        "on_disconnect": "keep",
    }
    cluster = hosts(2)
    before = [ports(host) for host in cluster.hosts]
    assert all(before)  # sshd's
    launch = launcher.start(launcher.file(cluster, job))
    launch.until("2 workers started")
    (folder,) = (launcher.home / "runs").iterdir()
    names = [host.name for host in cluster.hosts]

    def measured(name: str) -> bool:
        sample = telemetry.latest(folder, name)
        return sample is not None and bool(sample.gpus)

    until(lambda: all(map(measured, names)), "a sample of each host")
    assert [ports(host) for host in cluster.hosts] == before  # telemetry needs none
    launch.send(signal.SIGKILL)
    launch.wait()
    kept = {name: len(list(averages(folder, name))) for name in names}
    attached = launcher.command("attach", folder.name)
    attached.until("2 workers on 2 hosts")
    (tmp_path / "go").touch()
    done = attached.wait()
    assert done.code == 0, str(done)
    for name, use in zip(names, (97, 31), strict=True):
        found = list(averages(folder, name))
        assert len(found) > kept[name]
        assert found[-1].gpus[0].use == use
        assert {rank.process for rank in found[-1].ranks} <= {f"rank-{names.index(name)}"}
        windows = [one.time // 10 for one in found]
        assert windows == sorted(set(windows))  # each once
    assert launcher.left(cluster) == {}


def test_a_slow_network_without_lost_packets_is_named(
    hosts: Hosts, launcher: Launcher, tmp_path: Path
) -> None:
    cluster = hosts(3)
    # A queue that drains slowly drops nothing, but each message waits 20 ms in it.
    limit = "tc qdisc add dev eth0 root tbf rate 8mbit burst 4kb limit 1mb"
    cluster.hosts[2].run(*limit.split())
    stop = tmp_path / "stop"
    script = {"framework": "torch", "script": job("lock_step.py"), "args": ["0.01", "20000"]}
    launch = launcher.start(launcher.file(cluster, {**script, "env": {"STOP": str(stop)}}))
    launch.until("longer: the network of node3 is slow")
    stop.touch()
    done = launch.wait()
    assert done.code == 0, str(done)
    named = re.findall(r"steps take up to (\d+) % longer: the network of (\S+)", done.stderr)
    assert {host for _, host in named} == {"node3"}
    assert int(named[0][0]) > 50
    assert "slower than the others" not in done.stderr
