"""Real process groups, TensorFlow servers and measurements across hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from dtrain.parallelism.cluster import calibration
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.session.facts.preflight import rounds
from support.cluster import Launcher, job
from support.json_page import undocumented
from support.limits import HANG

Hosts = Callable[..., Cluster]
TORCH: dict[str, Any] = {"framework": "torch", "script": job("echo_env.py")}
TENSORFLOW = {**TORCH, "framework": "tensorflow"}


@pytest.mark.parametrize("count", range(10))
def test_every_pair_meets_once(count: int) -> None:
    found = list(rounds(range(count)))
    pairs = [pair for each in found for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert len(found) <= count + count % 2
    for each in found:
        players = [player for pair in each for player in pair]
        assert len(players) == len(set(players))


def documents(
    launcher: Launcher, cluster: Cluster, job_: Any, *options: str, **section: Any
) -> Any:
    file = launcher.file(cluster, job_, **section)
    done = launcher.command("check", str(file), "--json", *options).wait(HANG)
    assert "Traceback" not in done.stderr
    assert launcher.left(cluster) == {}
    found = json.loads(done.stdout)
    assert undocumented(found) == set()
    return found


@pytest.mark.netns
@pytest.mark.torch
def test_a_pair_that_cannot_connect_is_reported(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(3)
    cluster.block("node2", "node3")
    job_ = {**TORCH, "env": {"DTRAIN_START_TIMEOUT": "3"}}
    found = documents(launcher, cluster, job_, "--rendezvous")
    assert [(each["subject"], each["hosts"]) for each in found["findings"]] == [
        ("network", ["node2", "node3"]),
        ("rendezvous", ["node2", "node3"]),
    ]


@pytest.mark.netns
@pytest.mark.tensorflow
def test_tensorflow_servers_that_cannot_connect_are_reported(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(2)
    cluster.block("node1", "node2")
    job_ = {**TENSORFLOW, "env": {"DTRAIN_START_TIMEOUT": "5"}}
    found = documents(launcher, cluster, job_, "--rendezvous")
    named = [each["hosts"] for each in found["findings"] if each["subject"] == "rendezvous"]
    assert named == [["node1", "node2"]]


@pytest.mark.netns
@pytest.mark.torch
def test_a_slow_host_is_reported_and_the_planner_reads_the_file(
    hosts: Hosts, launcher: Launcher
) -> None:
    cluster = hosts(3)
    # All links are slow, so that the test measures the links and not a busy machine.
    for name, rate in (("node1", "800mbit"), ("node2", "800mbit"), ("node3", "200mbit")):
        limit = f"qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 50ms"
        cluster[name].run("tc", *limit.split())
    static = {**TORCH, "rendezvous": {"backend": "static"}}
    options = ("--rendezvous", "--bandwidth", "--output", "fabric.json")
    found = documents(launcher, cluster, static, *options)
    # The process group forms.
    (slow,) = found["findings"]
    assert (slow["subject"], slow["severity"], slow["hosts"]) == ("bandwidth", "warning", ["node3"])
    links = {tuple(link["hosts"]): link for link in found["bandwidth"]["links"]}
    assert len(links) == 6
    # 200 Mbit/s are 25 MB/s. The first 256 KB pass immediately.
    for other in ("node1", "node2"):
        assert 4e6 < links["node3", other]["bytes_per_second"] < 32e6
    assert {pair for pair, link in links.items() if link["slow"]} >= {
        ("node3", "node1"),
        ("node3", "node2"),
    }
    assert not links["node1", "node2"]["slow"]
    text = (launcher.folder / "fabric.json").read_text()
    a100 = hardware().gpu("a100-80gb")
    made = calibration.read(text, "fabric.json", Efficiency(), a100, 100.0)
    assert made.network < Efficiency().network


def test_bandwidth_is_for_torch(launcher: Launcher) -> None:
    file = launcher.folder / "cluster.yaml"
    file.write_text("cluster: {hosts: [a], gpus: 0}\njob: {framework: tensorflow, script: a.py}\n")
    done = launcher.command("check", str(file), "--bandwidth").wait()
    assert done.code == 2
    assert "framework: torch" in done.stderr
    done = launcher.command("check", str(file), "--output", "a.json").wait()
    assert done.code == 2
    assert "add --bandwidth" in done.stderr
    # Before the hosts are asked, and before the long measurement.
    done = launcher.command("check", str(file), "--bandwidth", "--output", "no/a.json").wait()
    assert done.code == 2
    assert "no such folder" in done.stderr


@pytest.mark.netns
@pytest.mark.torch
def test_a_plan_measures_the_hosts(hosts: Hosts, launcher: Launcher) -> None:
    """`api/test_trials.py` trains its best layouts."""
    cluster = hosts(2)
    file = launcher.file(cluster, TORCH)
    options = ("--model-size", "20M", "--seq-len", "128", "--global-batch", "8")
    done = launcher.command("plan", str(file), *options, "--probe", "--json").wait(HANG)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert undocumented(found) == set()
    assert found["cluster"]["gpu"] == found["probe"]["device"] == "cpu"
    assert found["cluster"]["hosts"] == 2
    assert {one["what"] for one in found["probe"]["measured"]} >= {
        "matrix products in fp32", "memory bandwidth", "all-reduce over all hosts"
    }  # fmt: skip
    assert all(one["value"] > 0 for one in found["probe"]["measured"])
    # The stored file is one for --calibrate.
    stored = json.loads(Path(found["probe"]["file"]).read_text())
    assert stored["gemm"]
    assert stored["collectives"]
    assert launcher.left(cluster) == {}
