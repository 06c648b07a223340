"""A crash on Kubernetes and over SSH: the same report, on the same machines."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from cluster import Cluster
from support.cluster import Launcher
from support.kubernetes.cluster import Kubernetes

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns, pytest.mark.sshd]

CRASH = """\
import os, time

def step(batch):
    raise ValueError(f"bad batch {batch}")

if os.environ["RANK"] == "2":
    step(7)
time.sleep(500)
"""


def test_a_crash_is_reported_as_over_ssh(
    kubernetes: Kubernetes, kubernetes_nodes: Cluster, launcher: Launcher
) -> None:
    shared = launcher.folder / "shared"
    shared.mkdir()
    (shared / "program.py").write_text(CRASH)
    hosts = kubernetes_nodes.hosts[:2]
    over_ssh = kubernetes_nodes.section(
        hosts=[host.name for host in hosts],
        overrides={host.name: {"address": host.address} for host in hosts},
        slots=2,
    )
    pods = {"image": "test:1", "host_paths": [f"{shared}:{shared}"]}
    on_kubernetes = {"kubernetes": pods, "nodes": 2, "gpus": 0, "slots": 2}

    def report(cluster: dict[str, Any], names: list[str]) -> str:
        job = {"framework": "none", "script": str(shared / "program.py")}
        file = launcher.folder / "cluster.yaml"
        file.write_text(yaml.safe_dump({"name": "test", "cluster": cluster, "job": job}))
        done = launcher.run(file, env=kubernetes.environment)
        assert done.code == 1, str(done)
        text = done.stderr.partition("\nerror: ")[2].partition("\ndtrain: ")[0]
        return re.sub(r"node\d", lambda found: f"host {names.index(found[0])}", text)

    expected = report(over_ssh, ["node1", "node2"])
    assert "rank 2 on host 1 exited with status 1" in expected
    assert "ValueError: bad batch 7" in expected
    assert report(on_kubernetes, ["node0", "node1"]) == expected
