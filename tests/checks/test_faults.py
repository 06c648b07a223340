"""Injected faults on real hosts: each is reported, on the right hosts, with a working remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from namespace_host import Host
from support.cluster import Launcher, job

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]
REAL: dict[str, Any] = {"framework": "torch", "script": job("echo_env.py")}
FAKES = Path(__file__).parent / "fakes"
JOB = {**REAL, "env": {"PYTHONPATH": str(FAKES / "torch-2.13.0")}}
"""Uses a fake torch, because the real one takes seconds to import on every host."""


class Checked:
    """The output of `dtrain check --json`."""

    def __init__(self, code: int, document: dict[str, Any]) -> None:
        self.code = code
        self.findings = document["findings"]

    def one(self, subject: str, *hosts: str) -> dict[str, Any]:
        """The only finding on ``subject``. Its hosts are ``hosts``."""
        found = [each for each in self.findings if each["subject"] == subject]
        assert len(found) == 1, self.findings
        assert found[0]["hosts"] == list(hosts)
        assert found[0]["seen"]
        assert found[0]["expected"]
        assert found[0]["remedy"]
        return dict(found[0])

    def only(self, subject: str, *hosts: str, severity: str = "error") -> dict[str, Any]:
        """`one`, and there is no other finding: a fault causes no false alarm."""
        finding = self.one(subject, *hosts)
        assert self.findings == [finding]
        assert finding["severity"] == severity
        assert self.code == (3 if severity == "error" else 0)
        return finding


def check(launcher: Launcher, file: Path, *options: str) -> Checked:
    done = launcher.command("check", str(file), "--json", *options).wait()
    assert done.stderr == ""
    return Checked(done.code, json.loads(done.stdout))


def healthy(launcher: Launcher, file: Path) -> None:
    found = check(launcher, file)
    assert found.findings == []
    assert found.code == 0


def by_name(cluster: Cluster, launcher: Launcher, job: dict[str, Any], **section: Any) -> Path:
    """A cluster file whose hosts connect to each other by name. Only the launcher has addresses."""
    config = launcher.folder / "ssh_config"
    config.write_text(
        "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in cluster.hosts)
    )
    ssh = {**cluster.section()["ssh"], "config": str(config)}  # type: ignore[dict-item]
    return launcher.file(cluster, job, ssh=ssh, overrides=section.pop("overrides", {}), **section)


@contextmanager
def running(host: Host, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``argv`` on the host, and wait until it has written a line."""
    with subprocess.Popen(
        host.command(*argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline()
        yield process


@pytest.mark.torch
def test_healthy_hosts_raise_no_alarm(hosts: Hosts, launcher: Launcher) -> None:
    """With the real torch; `test_scale.py` checks many hosts."""
    cluster = hosts(2)
    file = launcher.file(cluster, REAL, network={"interface": "eth0"})
    done = launcher.command("check", str(file)).wait()
    assert done.code == 0, done
    assert "2 hosts checked in" in done.stdout
    assert "no problems found" in done.stdout
    assert launcher.left(cluster) == {}
    healthy(launcher, by_name(cluster, launcher, JOB))


def test_a_blocked_pair(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(4)
    cluster.block("node2", "node4")
    file = launcher.file(cluster, JOB)
    found = check(launcher, file).only("network", "node2", "node4")
    assert "between node2 and node4" in found["seen"]
    addresses = [cluster[name].address for name in ("node2", "node4")]
    assert all(f"sudo ufw allow from {address}" in found["remedy"] for address in addresses)
    # The remedy: allow the other host.
    cluster.heal()
    healthy(launcher, file)


def test_only_the_rendezvous_port_is_blocked(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    cluster["node1"].firewall("tcp dport 29500 drop")
    file = launcher.file(cluster, JOB)
    found = check(launcher, file).only("network", "node1", "node2", "node3")
    assert "port 29500 of node1" in found["seen"]
    assert "sudo ufw allow 29500:30523/tcp" in found["remedy"]
    other = {**JOB, "rendezvous": {"port": 29600}}
    healthy(launcher, launcher.file(cluster, other, name="other.yaml"))


def test_a_path_that_drops_large_packets(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    cluster["node2"].firewall("ip length > 1400 tcp dport 1024-65535 tcp sport 1024-65535 drop")
    found = check(launcher, launcher.file(cluster, JOB)).only("mtu", "node2")
    assert "large packets do not arrive" in found["seen"]


@pytest.mark.parametrize("resolves_to", ["127.0.1.1", "::1"])
def test_a_name_that_resolves_to_loopback(
    hosts: Hosts, launcher: Launcher, resolves_to: str
) -> None:
    cluster = hosts(3)
    table = cluster["node3"].folder / "etc" / "hosts"
    address = cluster["node1"].address
    table.write_text(table.read_text().replace(f"{address} node1", f"{resolves_to} node1"))
    file = by_name(cluster, launcher, JOB)
    found = check(launcher, file).only("names", "node3")
    assert "node1" in found["seen"]
    assert resolves_to in found["seen"]
    assert f"cluster.overrides.node1.address: {address}" in found["remedy"]
    assert "/etc/hosts" in found["remedy"]
    healthy(launcher, launcher.file(cluster, JOB, name="addresses.yaml"))
    table.write_text(table.read_text().replace(f"{resolves_to} node1", f"{address} node1"))
    healthy(launcher, file)


def test_names_that_only_the_launching_machine_knows(hosts: Hosts, launcher: Launcher) -> None:
    """As with hosts whose addresses are in ~/.ssh/config alone."""
    cluster = hosts(2)
    for host in cluster.hosts:
        (host.folder / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    findings = check(launcher, by_name(cluster, launcher, JOB)).findings
    assert len(findings) == 2, findings
    for found, other in zip(findings, ("node1", "node2"), strict=True):
        assert "[Errno" not in found["seen"]
        address = cluster[other].address
        assert f"cluster.overrides.{other}.address: {address}" in found["remedy"]
        assert f"`{address} {other}` to /etc/hosts" in found["remedy"]


def test_an_unknown_name(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    table = cluster["node2"].folder / "etc" / "hosts"
    address = cluster["node3"].address
    table.write_text(table.read_text().replace(f"{address} node3\n", ""))
    file = by_name(cluster, launcher, JOB)
    found = check(launcher, file).only("names", "node2", severity="warning")
    assert f"`{address} node3` to /etc/hosts" in found["remedy"]
    with table.open("a") as lines:
        lines.write(f"{address} node3\n")
    healthy(launcher, file)


def test_a_name_that_resolves_to_another_host(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    for host in cluster.hosts:
        table = host.folder / "etc" / "hosts"
        if host.name != "node3":
            wrong = f"{cluster['node2'].address} node3"
            table.write_text(table.read_text().replace(f"{cluster['node3'].address} node3", wrong))
    found = check(launcher, by_name(cluster, launcher, JOB)).only(
        "names", "node1", "node2", severity="warning"
    )
    assert "resolves to node2" in found["seen"]
    healthy(launcher, launcher.file(cluster, JOB, name="addresses.yaml"))


def test_two_hosts_that_are_one_machine(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    section = cluster.section()
    overrides = dict(section["overrides"])  # type: ignore[call-overload]
    overrides["node3"] = overrides["node2"]
    file = launcher.file(cluster, JOB, overrides=overrides)
    found = check(launcher, file).only("hosts", "node2", "node3", severity="warning")
    assert "the same machine" in found["seen"]


def test_two_hosts_with_one_name(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    cluster["node3"].run("hostname", "node2")
    file = launcher.file(cluster, JOB)
    found = check(launcher, file).only("hosts", "node2", "node3", severity="warning")
    assert "have the host name node2" in found["seen"]
    cluster["node3"].run("hostname", "node3")
    healthy(launcher, file)


def test_a_script_and_a_module_that_differ(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    for host in cluster.hosts:
        (host.home / "job").mkdir()
        (host.home / "job" / "train.py").write_text("import model\n")
        (host.home / "job" / "model.py").write_text("layers = 3\n")
    job_ = {**JOB, "script": "train.py", "workdir": "~/job"}
    file = launcher.file(cluster, job_)
    healthy(launcher, file)
    (cluster["node3"].home / "job" / "model.py").write_text("layers = 4\n")
    found = check(launcher, file).only("code", "node3", severity="warning")
    assert "model.py" in found["seen"]
    (cluster["node1"].home / "job" / "train.py").write_text("import model  # new\n")
    both = check(launcher, file)
    assert both.code == 3
    assert "node[2-3]" in both.one("script", "node1")["seen"]
    # The remedy: send the folder with every launch.
    source = launcher.folder / "source"
    source.mkdir()
    (source / "train.py").write_text("")
    sent = {**job_, "sync": {"source": "source"}}
    healthy(launcher, launcher.file(cluster, sent, name="sent.yaml"))
    (source / "train.py").unlink()
    missing = check(launcher, launcher.file(cluster, sent, name="sent.yaml"))
    missing.only("script", "node1", "node2", "node3")


def test_no_permission_to_write(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    ssh = {**cluster.section()["ssh"], "user": "ml"}  # type: ignore[dict-item]
    home = f"{cluster['node2'].folder}/home/ml"
    # An ordinary account may not be able to run the Python of the tests.
    file = launcher.file(cluster, JOB, ssh=ssh, python="python3")
    healthy(launcher, file)
    cluster["node2"].run("chown", "root", home)
    found = check(launcher, file)
    refused = found.one("cluster.run_dir", "node2")
    assert refused["severity"] == "error"
    assert "sudo chown ml ~ there" in refused["remedy"]
    cluster["node2"].run("chown", "ml", home)
    healthy(launcher, file)


def test_a_read_only_disk(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2, home_size="2G")
    file = launcher.file(cluster, JOB)
    healthy(launcher, file)
    home = f"{cluster['node2'].folder}/home"
    cluster["node2"].run("mount", "-o", "remount,ro", home)
    found = check(launcher, file).one("cluster.run_dir", "node2")
    assert f"sudo mount -o remount,rw {home} there" in found["remedy"]
    cluster["node2"].run("mount", "-o", "remount,rw", home)
    healthy(launcher, file)


def test_a_full_disk(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2, home_size="40M")
    with (cluster["node2"].home / "ballast").open("wb") as ballast:
        ballast.write(bytes(36 << 20))
    found = check(launcher, launcher.file(cluster, JOB))
    worst = [each for each in found.findings if each["severity"] == "error"]
    assert [each["subject"] for each in worst] == ["cluster.run_dir"]
    assert worst[0]["hosts"] == ["node2"]


def test_a_busy_port(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    listen = "import socket; s = socket.create_server(('', 29500)); print(flush=True); input()"
    fixed = launcher.file(cluster, {**JOB, "rendezvous": {"port": 29500}}, name="fixed.yaml")
    with running(cluster["node1"], sys.executable, "-c", listen):
        found = check(launcher, fixed).only("port", "node1")
        assert "29500" in found["seen"]
        assert "create_server" in found["seen"]
        only = {**JOB, "rendezvous": {"ports": "29500-29500"}}
        found = check(launcher, launcher.file(cluster, only, name="only.yaml"))
        assert "widen job.rendezvous.ports" in found.only("port", "node1")["remedy"]
        healthy(launcher, launcher.file(cluster, JOB))
    healthy(launcher, fixed)


def test_an_interface_that_only_some_have(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    host = cluster["node3"]
    for command in ("set eth0 down", "set eth0 name net0", "set net0 up"):
        host.run("ip", "link", *command.split())
    file = launcher.file(cluster, JOB, network={"interface": "eth0"})
    found = check(launcher, file).only("interface", "node3")
    assert "interface eth0 does not exist; available: net0" in found["seen"]
    assert found["remedy"] == "set cluster.overrides.node3.interface: net0"
    remedied = cluster.section()["overrides"]
    remedied["node3"]["interface"] = "net0"  # type: ignore[index]
    healthy(
        launcher,
        launcher.file(cluster, JOB, network={"interface": "eth0"}, overrides=remedied),
    )


def test_an_interface_that_is_down(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    for host in cluster.hosts:
        host.run("ip", "link", "add", "ib0", "type", "veth", "peer", "name", "ib1")
    file = launcher.file(cluster, JOB, network={"interface": "ib0"})
    found = check(launcher, file).only("interface", "node1", "node2")
    assert "ib0 is down" in found["seen"]


def other_python(folder: Path, code: str) -> str:
    """An interpreter that runs ``code`` first, with any options."""
    path = folder / "python"
    path.write_text(
        '#!/bin/sh\noptions=\nwhile [ "$1" != -c ]; do options="$options $1"; shift; done\n'
        "shift; code=$1; shift\n"
        f'exec {sys.executable} $options -c "{code}\n$code" "$@"\n'
    )
    path.chmod(0o755)
    folder.chmod(0o755)
    return str(path)


def with_python(
    cluster: Cluster, launcher: Launcher, name: str, python: str, job: dict[str, Any] = JOB
) -> Path:
    section = cluster.section()
    overrides = dict(section["overrides"])  # type: ignore[call-overload]
    overrides[name] = {**overrides[name], "python": python}
    return launcher.file(cluster, job, overrides=overrides)


def test_a_wrong_clock(hosts: Hosts, launcher: Launcher, tmp_path: Path) -> None:
    """Hosts in namespaces share one clock, so the program that reads it is modified on one host."""
    cluster = hosts(3)
    bend = "import time; time.time = lambda now=time.time: now() + 90"
    file = with_python(cluster, launcher, "node2", other_python(tmp_path, bend))
    found = check(launcher, file).only("clock", "node2", severity="warning")
    assert "90 s ahead" in found["seen"]
    assert "set-ntp" in found["remedy"]


def test_another_torch_on_one_host(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    overrides: Any = cluster.section()["overrides"]
    overrides["node3"]["env"] = {"PYTHONPATH": str(FAKES / "torch-2.4.1")}
    file = launcher.file(cluster, JOB, overrides=overrides)
    found = check(launcher, file).only("torch", "node3")
    assert found["seen"] == "torch 2.4.1+cpu; torch 2.13.0+cpu on node[1-2]"
    assert f"{sys.executable} -m pip install 'torch==2.13.0+cpu'" in found["remedy"]
    healthy(launcher, launcher.file(cluster, JOB, name="remedied.yaml"))


def test_a_torch_that_cannot_be_imported(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    overrides: Any = cluster.section()["overrides"]
    overrides["node1"]["env"] = {"PYTHONPATH": str(FAKES / "torch-broken")}
    found = check(launcher, launcher.file(cluster, JOB, overrides=overrides))
    assert "GLIBC_2.28' not found" in found.only("torch", "node1")["seen"]


@pytest.mark.torch
def test_no_torch_on_one_host(hosts: Hosts, launcher: Launcher, tmp_path: Path) -> None:
    cluster = hosts(2)
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    tmp_path.chmod(0o755)
    python = str(bare / "bin" / "python")
    found = check(launcher, with_python(cluster, launcher, "node2", python, job=REAL))
    assert "torch is not installed" in found.one("torch", "node2")["seen"]


def test_no_interpreter_on_one_host(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    found = check(launcher, with_python(cluster, launcher, "node2", "/opt/none/bin/python"))
    assert "cluster.python" in found.only("python", "node2")["remedy"]


def test_setup_that_fails_on_one_host(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    (cluster["node1"].home / "env.sh").write_text("ulimit -n 4096\n")
    file = launcher.file(cluster, {**JOB, "setup": ["true", "source ~/env.sh"]})
    found = check(launcher, file).only("setup", "node2")
    assert "line 2 of job.setup (source ~/env.sh) failed" in found["seen"]
    (cluster["node2"].home / "env.sh").write_text("")
    healthy(launcher, file)


def test_a_limit_set_by_setup(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(1)
    file = launcher.file(cluster, {**JOB, "setup": ["ulimit -n 100"]})
    found = check(launcher, file).only("nofile", "node1")
    assert "may open 100 files" in found["seen"]
    remedied = {**JOB, "setup": ["ulimit -n 8192"]}
    healthy(launcher, launcher.file(cluster, remedied, name="more.yaml"))


def test_leftovers_of_an_earlier_run(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(cluster, JOB)
    left = ("env", "DTRAIN_RUN_ID=old-run", "sh", "-c", "echo; read line")
    beside = ("env", "EDITED=/runs/old-run", "sh", "-c", "echo; read line")
    with (
        running(cluster["node1"], *left),
        running(cluster["node2"], *left),
        running(cluster["node1"], *beside) as bystander,
    ):
        found = check(launcher, file).only("processes", "node1", "node2", severity="warning")
        assert "old-run" in found["seen"]
        _, kill = found["remedy"].split(
            "dtrain stop old-run, where it was launched, or run there: "
        )
        for name in ("node1", "node2"):
            cluster[name].run("sh", "-c", kill)
        assert bystander.poll() is None
    healthy(launcher, file)


def test_an_unreachable_host_hides_nothing_else(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    cluster["node2"].run("pkill", "sshd")
    cluster["node3"].run("mount", "-o", "remount,size=64M", "/dev/shm")
    job = {**JOB, "env": {**JOB["env"], "DATA": "$HOME/data"}}
    done = launcher.command("check", str(launcher.file(cluster, job))).wait()
    assert done.code == 3
    assert "no shell reads the values of env: DATA" in done.stderr
    assert "Traceback" not in done.stderr
    assert "error    node2: ssh" in done.stdout
    assert "warning  node3: /dev/shm" in done.stdout
    assert "64 MiB" in done.stdout
    assert "remedy" in done.stdout
    assert launcher.left(cluster) == {}
