"""The local multi-host cluster behaves as end-to-end tests assume."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import cluster as script
from cluster import PREFIX, STATE, Cluster
from namespace_host import Host
from support.limits import HANG, until

pytestmark = [pytest.mark.netns, pytest.mark.sshd]
Hosts = Callable[..., Cluster]


def over_ssh(cluster: Cluster, host: Host, command: str, *, user: str = "root") -> str:
    done = subprocess.run(
        [*cluster.ssh(host, user=user), command],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )
    return done.stdout


def reaches(cluster: Cluster, source: str, target: str) -> bool:
    """Whether a TCP connection from one host to another's sshd succeeds."""
    code = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=2)"
    command = cluster[source].command(sys.executable, "-c", code, cluster[target].address)
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_every_host_has_its_own_name_home_and_processes(hosts: Hosts) -> None:
    cluster = hosts(2)
    for host in cluster.hosts:
        said = over_ssh(cluster, host, "hostname; pwd; echo $HOME; echo $$ > mine")
        assert said.splitlines() == [host.name, str(host.home), str(host.home)]
        assert (host.home / "mine").exists()
        assert "ml" in over_ssh(cluster, host, "id -un", user="ml")
    first, second = cluster.hosts
    assert first.home != second.home
    command = "import subprocess as s; s.Popen(['sleep', '98765'], start_new_session=True)"
    over_ssh(cluster, first, f'{sys.executable} -c "{command}" >/dev/null 2>&1')
    assert [name for name in first.processes().values() if "98765" in name]
    assert "98765" not in over_ssh(cluster, second, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    first.kill_all()
    assert first.processes() == {} == second.processes()


def test_the_firewall_separates_hosts_and_heals(hosts: Hosts) -> None:
    cluster = hosts(3)
    assert reaches(cluster, "node1", "node2")
    cluster.block("node1", "node2")
    assert not reaches(cluster, "node1", "node2")
    assert not reaches(cluster, "node2", "node1")
    assert reaches(cluster, "node1", "node3")
    cluster.heal()
    assert reaches(cluster, "node2", "node1")


def test_a_host_that_lost_power_comes_back(hosts: Hosts) -> None:
    cluster = hosts(2)
    cluster.power_off("node2")
    assert cluster["node2"].processes() == {}
    cluster.boot("node2")
    assert over_ssh(cluster, cluster["node2"], "hostname").strip() == "node2"


def test_home_disks_can_be_full(hosts: Hosts) -> None:
    cluster = hosts(1, home_size="1M")
    (host,) = cluster.hosts
    full = over_ssh(cluster, host, "head -c 2M /dev/zero 2>&1 >big || true; wc -c <big")
    assert int(full.split()[-1]) <= 1 << 20
    assert (host.home / "big").exists()


def test_nothing_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    script = (
        "from cluster import Cluster; import time\n"
        "cluster = Cluster(2)\n"
        "print(cluster.folder, *(host.pid for host in cluster.hosts), flush=True)\n"
        "time.sleep(600)"
    )
    scripts = Path(__file__).resolve().parents[2] / "scripts"
    owner = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(scripts)},
    )
    assert owner.stdout
    folder, *pids = owner.stdout.readline().split()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the end of the hosts")
    assert Path(folder).name.startswith(PREFIX)
    # The next cluster removes such folders once they are old enough.
    os.utime(folder, (0, 0))
    with Cluster(1):
        assert not Path(folder).exists()
    assert Path(folder).parent == STATE


def test_a_cluster_whose_owner_is_in_another_container_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has another number there. It holds the lock."""
    monkeypatch.setattr(script, "STATE", tmp_path)
    theirs, crashed = (tmp_path / f"{PREFIX}{name}" for name in ("theirs", "crashed"))
    for folder in (theirs, crashed):
        folder.mkdir()
        (folder / "owner").write_text(f"{os.getpid()} 1")
        os.utime(folder, (0, 0))
    with (theirs / "owner").open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        script._sweep()
    assert [*tmp_path.iterdir()] == [theirs]


def test_down_stops_no_cluster_of_another_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "STATE", tmp_path)
    me = os.getpid()
    for name, checkout, owner in (
        ("mine", script.CHECKOUT, script._identity(me)),
        ("ended", script.CHECKOUT, f"{me} 1"),
        ("theirs", "/elsewhere", script._identity(me)),
        ("of-a-test", None, script._identity(me)),
    ):
        folder = tmp_path / f"{PREFIX}{name}"
        folder.mkdir()
        (folder / "owner").write_text(owner)
        if checkout is not None:
            (folder / "kept").write_text(checkout)
    mine, theirs = (tmp_path / f"{PREFIX}{name}" for name in ("mine", "theirs"))
    assert script.kept("") == {mine: me}
    assert script.kept(str(theirs)) == {theirs: me}
    assert script.kept(str(tmp_path / f"{PREFIX}of-a-test")) == {}
