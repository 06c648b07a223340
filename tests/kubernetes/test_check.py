"""`dtrain check` on a cluster: permissions, kinds, objects, quota and GPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from support.cluster import Launcher
from support.kubernetes.cluster import Kubernetes
from support.launching import Done

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]


def check(kubernetes: Kubernetes, launcher: Launcher, gpus: int = 0, **keys: Any) -> Done:
    section = {"image": "test:1", **keys}
    cluster = {"kubernetes": section, "nodes": 2, "gpus": gpus, **({} if gpus else {"slots": 1})}
    job = {"framework": "none", "command": ["true"], "secrets": ["TOKEN"]}
    file = launcher.folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"name": "test", "cluster": cluster, "job": job}))
    return launcher.command("check", str(file), "--json", env=kubernetes.environment).wait()


def seen(done: Done) -> list[str]:
    return [one["seen"] for one in json.loads(done.stdout)["findings"]]


def test_a_cluster_that_has_all(kubernetes: Kubernetes, launcher: Launcher) -> None:
    for api in ("jobset", "trainjob"):
        done = check(kubernetes, launcher, gpus=2, api=api)
        assert (done.code, seen(done)) == (0, []), str(done)
    assert kubernetes.list("jobsets") == kubernetes.list("trainjobs") == []


def test_each_missing_permission_is_named(kubernetes: Kubernetes, launcher: Launcher) -> None:
    for verb, resource in (("watch", "pods"), ("get", "pods/log"), ("create", "secrets")):
        kubernetes.deny(verb, resource)
    done = check(kubernetes, launcher)
    assert done.code == 3, str(done)
    assert seen(done) == [
        "you may not watch pods in the namespace ml",
        "you may not get pods/log in the namespace ml",
        "you may not create secrets in the namespace ml",
    ]


def test_kinds_and_objects_that_the_cluster_lacks(
    kubernetes: Kubernetes, launcher: Launcher
) -> None:
    done = check(kubernetes, launcher, priority="high", claims=["data:/data"])
    assert done.code == 3, str(done)
    assert seen(done) == [
        "there is no data among the persistentvolumeclaims of the cluster",
        "there is no high among the priorityclasses of the cluster",
    ]
    kubernetes.remove_api("jobset.x-k8s.io")
    assert seen(check(kubernetes, launcher)) == [
        "the cluster does not know jobsets.jobset.x-k8s.io"
    ]


def test_gpus_and_quota(kubernetes: Kubernetes, launcher: Launcher) -> None:
    kubernetes.limit(**{"requests.nvidia.com/gpu": "4"})
    done = check(kubernetes, launcher, gpus=8)
    assert done.code == 3, str(done)
    assert seen(done) == [
        "the job needs 16 requests.nvidia.com/gpu, and the quota is 4",
        "0 of 4 machines have 8 nvidia.com/gpu; the most that one has is 2",
    ]


def test_a_server_that_does_not_answer(kubernetes: Kubernetes, launcher: Launcher) -> None:
    with kubernetes.down():
        done = check(kubernetes, launcher)
    assert done.code == 3, str(done)
    assert "asking the API server" in done.stdout
