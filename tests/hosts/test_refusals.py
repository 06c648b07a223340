"""A launch that cannot start reports the reason for each host and leaves no files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from support.cluster import Done, Launcher, job

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]
JOB: dict[str, Any] = {"framework": "torch", "script": job("echo_env.py")}


def refused(done: Done, cluster: Cluster, launcher: Launcher, *words: str) -> None:
    """Nothing was started or left. One screen names the host, the reason and the remedy."""
    assert done.code == 3, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 24, done.stderr
    for word in (*words, "hint: "):
        assert word in done.stderr, done.stderr
    assert launcher.left(cluster) == {}
    for host in cluster.hosts:
        if host.pid:
            assert not (host.home / ".dtrain").exists(), host.name


def test_an_unreachable_host(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    cluster.power_off("node2")
    file = launcher.file(cluster, JOB)
    text = file.read_text().replace("ssh:", "ssh:\n    connect_timeout: 2s", 1)
    file.write_text(text)
    refused(launcher.run(file), cluster, launcher, "node2", "10.213.")


def test_sshd_is_not_running(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    cluster["node2"].run("pkill", "sshd")
    refused(launcher.run(launcher.file(cluster, JOB)), cluster, launcher, "node2", "refused")


def test_a_wrong_host_key(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    lines = cluster.known_hosts.read_text().splitlines()
    keys = [line.split(" ", 1) for line in lines]
    swapped = {cluster.hosts[0].address: cluster.hosts[1].address}
    swapped |= {there: here for here, there in swapped.items()}
    cluster.known_hosts.write_text(
        "".join(f"{swapped.get(name, name)} {key}\n" for name, key in keys)
    )
    done = launcher.run(launcher.file(cluster, JOB))
    refused(done, cluster, launcher, "node1", "node2", "SHA256:", str(cluster.known_hosts))


def test_an_unknown_host_key(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    cluster.known_hosts.write_text("")
    done = launcher.run(launcher.file(cluster, JOB))
    refused(done, cluster, launcher, "node1", "node2", "SHA256:", "accept-new")


def test_a_refused_key(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    (cluster["node2"].home / ".ssh" / "authorized_keys").write_text("")
    done = launcher.run(launcher.file(cluster, JOB), env={"SSH_AUTH_SOCK": ""})
    refused(done, cluster, launcher, "node2", str(cluster.identity), "ssh-copy-id")


def test_a_missing_script(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    (cluster["node1"].home / "train.py").write_text("")
    done = launcher.run(launcher.file(cluster, {**JOB, "script": "train.py"}))
    refused(done, cluster, launcher, "node2", "train.py", "job.workdir", "job.sync")
    assert "node1:" not in done.stderr


def test_no_python(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(cluster, JOB, python="/opt/no such/python")
    refused(launcher.run(file), cluster, launcher, "node1", "/opt/no such/python", "cluster.python")


def test_a_python_that_is_too_old(hosts: Hosts, launcher: Launcher, tmp_path: Path) -> None:
    """An old Python's error on the boot line, from a Python that pretends to be old."""
    cluster = hosts(2)
    old = tmp_path / "python"
    old.write_text(
        '#!/bin/sh\nwhile [ "$1" != -c ]; do shift; done; shift; code=$1; shift\n'
        f'exec {sys.executable} -c "import sys; sys.version_info = (3, 6, 8)\n'
        '$code" "$@"\n'
    )
    old.chmod(0o755)
    tmp_path.chmod(0o755)
    file = launcher.file(cluster, JOB, python=str(old))
    refused(launcher.run(file), cluster, launcher, "node1", "3.6 is too old", "3.8")


def test_a_busy_port(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    script = "import socket; s = socket.create_server(('', 29500)); print(flush=True); input()"
    with subprocess.Popen(
        cluster["node1"].command(sys.executable, "-c", script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        fixed = launcher.file(cluster, {**JOB, "rendezvous": {"port": 29500}}, name="fixed.yaml")
        done = launcher.run(fixed)
        assert done.code == 3, done
        for word in ("node1", "29500", "python", "hint: "):
            assert word in done.stderr
        only = launcher.file(
            cluster, {**JOB, "rendezvous": {"ports": "29500-29500"}}, name="only.yaml"
        )
        done = launcher.run(only)
        assert done.code == 3, done
        for word in ("node1", "port 29500 is taken by", "job.rendezvous.ports"):
            assert word in done.stderr
        # If the file names no port, a busy port is no reason to fail.
        two = {**JOB, "rendezvous": {"ports": "29500-29501"}}
        free = launcher.run(launcher.file(cluster, two))
        assert free.code == 0, str(free)
        assert "failed" not in free.stderr


def test_a_full_disk(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2, home_size="40M")
    with (cluster["node2"].home / "ballast").open("wb") as ballast:
        ballast.write(bytes(36 << 20))
    done = launcher.run(launcher.file(cluster, JOB))
    refused(done, cluster, launcher, "node2", "free", "cluster.run_dir")


def test_setup_that_fails_on_one_host(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    (cluster["node1"].home / "env.sh").write_text("export FOUND=1\n")
    done = launcher.run(launcher.file(cluster, {**JOB, "setup": ["source ~/env.sh"]}))
    refused(done, cluster, launcher, "node2", "setup", "env.sh")


def test_names_with_shell_syntax(hosts: Hosts, launcher: Launcher) -> None:
    """Workers get every argument, variable and folder byte for byte."""
    cluster = hosts(2)
    args = ["it's", 'a "b"', "$(touch /x); echo", "line\nbreak", "", "-n", "~", "a\\b", "ü 🙂", "*"]
    env = {"GREETING": "$HOME `id` 'q' \"d\"\n; echo hi", "EMPTY": ""}
    folder = "my runs; $(id) 'quoted'"
    for host in cluster.hosts:
        (host.home / folder).mkdir()
    job_ = {**JOB, "args": args, "env": env, "workdir": f"~/{folder}", "secrets": ["TOKEN"]}
    key = "hush $(id)\n'"
    file = launcher.file(cluster, job_)
    done = launcher.run(file, "--json", env={"TOKEN": key})
    assert done.code == 0, str(done)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    said = [json.loads(each["text"]) for each in lines if each["event"] == "line"]
    assert len(said) == 2
    for each in said:
        assert each["argv"] == args
        assert each["cwd"].endswith(f"/{folder}")
        assert {name: each["environment"][name] for name in env} == env
        assert each["environment"]["TOKEN"] == key
    journal = b"".join(path.read_bytes() for path in launcher.home.rglob("journal.jsonl"))
    assert b"hush" not in journal
    assert launcher.left(cluster) == {}
