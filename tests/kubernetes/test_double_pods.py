"""Pods of the test cluster run as their specification says."""

from __future__ import annotations

import sys

import pytest

from support.kubernetes.cluster import Kubernetes
from support.kubernetes.kinds import Object
from support.kubernetes.manifests import jobset, trainjob

pytestmark = [pytest.mark.kubernetes, pytest.mark.netns]

WAIT = "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done"


def start(kubernetes: Kubernetes, wanted: Object) -> None:
    kind = f"{wanted['kind'].lower()}s"
    kubernetes.submit(kind, wanted)


def lines(kubernetes: Kubernetes, index: int, name: str = "train") -> list[str]:
    pod = kubernetes.pods(name)[index]
    return kubernetes.log(pod["metadata"]["name"]).decode().splitlines()


def wait_for_output(kubernetes: Kubernetes, text: str, *indexes: int) -> None:
    def is_so() -> bool:
        found = kubernetes.pods("train")
        running = [
            found[index]["status"]["phase"] == "Running" for index in indexes if index in found
        ]
        return running == [True] * len(indexes) and all(
            text in lines(kubernetes, index) for index in indexes
        )

    kubernetes.wait(text, is_so)


def test_a_jobset_runs_as_written(kubernetes: Kubernetes) -> None:
    kubernetes.create("secrets", {"metadata": {"name": "s"}, "data": {"KEY": "dmFsdWU="}})
    kubernetes.create("configmaps", {"metadata": {"name": "c"}, "data": {"a.txt": "of a map"}})
    env = [
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "KEY"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "BOTH", "value": "$(KEY) $$(KEY)"},
    ]
    script = """
echo $JOB_COMPLETION_INDEX $(hostname) $KEY "$BOTH" $(cat /code/a.txt)
until getent hosts train-node-0-1.train >/dev/null; do sleep 0.1; done
[ "$(getent hosts train-node-0-$JOB_COMPLETION_INDEX.train.ml.svc.cluster.local | wc -l)" = 1 ]
python -c 'import torch, sys; print(sys.prefix)'
pwd
echo $NODE >/dev/termination-log
touch /code/a.txt 2>/dev/null || echo read only
"""
    wanted = jobset(
        script,
        container={
            "env": env,
            "workingDir": "/srv/app",
            "volumeMounts": [{"name": "code", "mountPath": "/code", "readOnly": True}],
        },
        pod={"volumes": [{"name": "code", "configMap": {"name": "c"}}]},
    )
    start(kubernetes, wanted)
    kubernetes.wait_for("jobsets", "train", "Completed")
    said = lines(kubernetes, 1)
    assert said[0] == "1 train-node-0-1 value value $(KEY) of a map"
    assert said[1:] == [sys.prefix, "/srv/app", "read only"]
    pod = kubernetes.pods("train")[0]
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"].strip()) == (0, pod["spec"]["nodeName"])


def test_a_trainjob_gets_torchs_variables(kubernetes: Kubernetes) -> None:
    script = "echo $PET_NNODES $PET_NPROC_PER_NODE $PET_NODE_RANK $PET_MASTER_ADDR $PET_MASTER_PORT"
    start(kubernetes, trainjob(script, numProcPerNode=2))
    kubernetes.wait_for("trainjobs", "train", "Complete")
    assert lines(kubernetes, 1) == ["2 2 1 train-node-0-0.train 29500"]


def test_a_failure_restarts_every_pod_until_the_limit(kubernetes: Kubernetes) -> None:
    start(kubernetes, jobset("exit 4", failurePolicy={"maxRestarts": 1}))
    kubernetes.wait_for("jobsets", "train", "Failed")
    status = (kubernetes.get("jobsets", "train") or {})["status"]
    assert status["restarts"] == 1
    assert status["conditions"][-1]["reason"] == "ReachedMaxRestarts"


def test_a_deleted_jobset_gets_its_grace_period(kubernetes: Kubernetes) -> None:
    start(kubernetes, jobset(WAIT, pods=1))
    wait_for_output(kubernetes, "up", 0)
    name = kubernetes.pods("train")[0]["metadata"]["name"]
    follow = kubernetes.stream("logs", "--follow", "--timestamps", name)
    assert follow.stdout.readline().split()[1] == "up"
    kubernetes.kubectl("delete", "jobset", "train", "--cascade=foreground")
    assert follow.communicate()[0].split()[1] == "bye"
    assert kubernetes.list("pods") == kubernetes.list("jobs") == kubernetes.list("services") == []


def test_faults_of_pods_and_nodes(kubernetes: Kubernetes) -> None:
    start(kubernetes, jobset(WAIT, failurePolicy={"maxRestarts": 5}))
    wait_for_output(kubernetes, "up", 0, 1)
    first = kubernetes.pods("train")[0]["metadata"]["name"]
    kubernetes.evict(first)
    kubernetes.wait("a restart", lambda: _restarts(kubernetes) == 1)
    wait_for_output(kubernetes, "up", 0, 1)
    lost = kubernetes.pods("train")[1]["spec"]["nodeName"]
    kubernetes.lose_node(lost)
    kubernetes.wait("a restart", lambda: _restarts(kubernetes) == 2)
    wait_for_output(kubernetes, "up", 0, 1)
    assert lost not in {pod["spec"]["nodeName"] for pod in kubernetes.pods("train").values()}


def _restarts(kubernetes: Kubernetes) -> int:
    jobset = kubernetes.get("jobsets", "train") or {}
    return int(jobset["status"].get("restarts", 0))


def test_what_keeps_a_pod_from_starting_is_said(kubernetes: Kubernetes) -> None:
    kubernetes.break_image("test:1", "not found")
    kubernetes.limit(**{"requests.nvidia.com/gpu": "4"})
    container = {"resources": {"limits": {"nvidia.com/gpu": 3}}}
    wanted = jobset(
        "true", container=container, metadata={"labels": {"kueue.x-k8s.io/queue-name": "q"}}
    )
    kubernetes.add_queue("q")
    start(kubernetes, wanted)
    kubernetes.wait("a workload", lambda: kubernetes.list("workloads"))
    assert kubernetes.list("pods") == []
    kubernetes.release("train")
    kubernetes.wait("events", lambda: {"FailedCreate", "FailedScheduling"} <= _reasons(kubernetes))
    said = " ".join(kubernetes.events())
    assert "exceeded quota: limits, requested: requests.nvidia.com/gpu=3" in said
    assert "0/4 nodes are available: 4 Insufficient nvidia.com/gpu." in said
    start(kubernetes, jobset("true", name="small", pods=1))

    def waiting() -> bool:
        statuses = kubernetes.pods("small").get(0, {}).get("status", {}).get("containerStatuses")
        return bool(statuses) and statuses[0]["state"]["waiting"]["reason"] == "ImagePullBackOff"

    kubernetes.wait("an image", waiting)
    kubernetes.repair_image("test:1")
    kubernetes.wait_for("jobsets", "small", "Completed")


def _reasons(kubernetes: Kubernetes) -> set[str]:
    return {event.partition(":")[0] for event in kubernetes.events()}


def test_a_rotated_log_begins_later(kubernetes: Kubernetes) -> None:
    start(kubernetes, jobset("echo one; echo two >&2; sleep 500", pods=1))
    wait_for_output(kubernetes, "two", 0)
    name = kubernetes.pods("train")[0]["metadata"]["name"]
    assert kubernetes.kubectl("logs", "--tail=1", name) == "two\n"
    assert kubernetes.kubectl("logs", "--limit-bytes=3", name) == "one"
    kubernetes.rotate_log(name)
    assert kubernetes.kubectl("logs", name) == ""
