"""A launch that cannot start reports the reason for each host and leaves no files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
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


def test_a_busy_port_that_another_can_replace(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    script = "import socket; s = socket.create_server(('', 29500)); print(flush=True); input()"
    with subprocess.Popen(
        cluster["node1"].command(sys.executable, "-c", script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        two = {**JOB, "rendezvous": {"ports": "29500-29501"}}
        free = launcher.run(launcher.file(cluster, two))
        assert free.code == 0, str(free)
        assert "failed" not in free.stderr


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
