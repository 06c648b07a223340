"""Real torch and TensorFlow jobs across several hosts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from cluster import Cluster
from support.cluster import Launcher, job
from support.limits import HANG

pytestmark = pytest.mark.netns
Hosts = Callable[..., Cluster]


def summaries(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line.partition("] ")[2]) for line in stdout.splitlines() if "{" in line]


@pytest.mark.torch
def test_torchrun(hosts: Hosts, launcher: Launcher) -> None:
    """`test_strategies.py` and `test_ends.py` start the ranks without it."""
    cluster = hosts(2)
    file = launcher.file(
        cluster,
        {
            "framework": "torch",
            "script": job("allreduce_torch.py"),
            "rendezvous": {"backend": "c10d"},
        },
        slots=2,
        network={"interface": "eth0"},
    )
    done = launcher.run(file, "--no-check")
    assert done.code == 0, str(done)
    found = sorted(summaries(done.stdout), key=lambda each: int(each["environment"]["RANK"]))
    assert [each["environment"]["RANK"] for each in found] == ["0", "1", "2", "3"]
    assert {each["sum"] for each in found} == {10.0}
    assert {each["hostname"] for each in found} == {"node1", "node2"}
    assert {each["environment"]["GLOO_SOCKET_IFNAME"] for each in found} == {"eth0"}
    # Each rank's output has its own prefix.
    prefixes = {line.partition("]")[0].split()[1] for line in done.stdout.splitlines()}
    assert prefixes == {"0", "1", "2", "3"}
    assert launcher.left(cluster) == {}


@pytest.mark.tensorflow
def test_tensorflow_workers(hosts: Hosts, launcher: Launcher) -> None:
    """With a proxy in the environment that would drop the cluster's own traffic."""
    cluster = hosts(2)
    proxy = dict.fromkeys(("http_proxy", "https_proxy"), "http://10.255.255.1:3128")
    file = launcher.file(
        cluster, {"framework": "tensorflow", "script": job("tf_worker.py"), "env": proxy}
    )
    done = launcher.run(file, timeout=HANG)
    assert done.code == 0, str(done)
    found = summaries(done.stdout)
    assert sorted(each["task"]["index"] for each in found) == [0, 1]
    assert {each["slope"] for each in found} == {3.0}
    assert launcher.left(cluster) == {}


@pytest.mark.torch
def test_scripts_of_a_dry_run_train_by_hand(hosts: Hosts, launcher: Launcher) -> None:
    cluster = hosts(2)
    file = launcher.file(cluster, {"framework": "torch", "script": job("allreduce_torch.py")})
    rendered = launcher.folder / "rendered"
    assert launcher.run(file, "--dry-run", "--output", str(rendered)).code == 0
    by_hand = [
        subprocess.Popen(
            host.command("bash", str(rendered / host.name / f"worker-{rank}.sh")),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(cluster.hosts)
    ]
    outputs = [process.communicate(timeout=HANG)[0] for process in by_hand]
    assert [process.returncode for process in by_hand] == [0, 0]
    assert [json.loads(output)["sum"] for output in outputs] == [3.0, 3.0]
