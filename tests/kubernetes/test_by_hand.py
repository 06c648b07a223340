"""``job.yaml`` of a dry run, applied with kubectl alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from support.cluster import Launcher
from support.kubernetes.cluster import Kubernetes
from support.launching import JOBS

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]

TORCH = {"framework": "torch", "script": "/jobs/allreduce_torch.py"}
TENSORFLOW = {
    "framework": "tensorflow",
    "strategy": "multi_worker_mirrored",
    "script": "/jobs/tf_worker.py",
}


def apply(
    kubernetes: Kubernetes, launcher: Launcher, job: dict[str, Any], slots: int, **keys: Any
) -> str:
    """The name of the job that kubectl has created from a dry run for two pods."""
    section = {"image": "test:1", "host_paths": [f"{JOBS}:/jobs:ro"], **keys}
    cluster = {"kubernetes": section, "nodes": 2, "gpus": 0, "slots": slots}
    file = launcher.folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"name": "test", "cluster": cluster, "job": job}))
    done = launcher.run(file, "--dry-run", "--output", str(launcher.folder / "out"))
    assert done.code == 0, str(done)
    manifest = launcher.folder / "out" / "job.yaml"
    kubernetes.kubectl("apply", "--dry-run=server", "-f", str(manifest))
    kubernetes.kubectl("apply", "-f", str(manifest))
    *_, found = yaml.safe_load_all(manifest.read_text())
    return str(found["metadata"]["name"])


def results(kubernetes: Kubernetes, name: str) -> list[dict[str, Any]]:
    """What each rank has printed as JSON."""
    logs = [kubernetes.log(pod["metadata"]["name"]) for pod in kubernetes.pods(name).values()]
    lines = [line.partition("] ")[2] for log in logs for line in log.decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.torch
def test_a_trainjob_runs_torchrun(kubernetes: Kubernetes, launcher: Launcher) -> None:
    name = apply(kubernetes, launcher, TORCH, 2, api="trainjob")
    kubernetes.wait_for_end("trainjobs", name)
    found = results(kubernetes, name)
    assert [one["sum"] for one in found] == [10.0] * 4, kubernetes.all_logs()
    assert {one["hostname"] for one in found} == {f"{name}-node-0-0", f"{name}-node-0-1"}


@pytest.mark.tensorflow
def test_tensorflow_finds_its_workers(kubernetes: Kubernetes, launcher: Launcher) -> None:
    name = apply(kubernetes, launcher, TENSORFLOW, 1)
    kubernetes.wait_for_end("jobsets", name)
    slopes = [one["slope"] for one in results(kubernetes, name)]
    assert slopes == pytest.approx([3.0] * 2, abs=0.1), kubernetes.all_logs()
