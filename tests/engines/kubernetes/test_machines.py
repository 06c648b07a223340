"""The GPUs of a cluster's machines, for a plan."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.engines.kubernetes import machines
from dtrain.parallelism.cluster.hardware_table import hardware
from dtrain.planning.request import QueueGpus
from dtrain.spec.load import parse
from dtrain.spec.model import Kubernetes
from dtrain_cli.first_kubernetes_file import KubernetesAnswers, text


def machine(kind: str, gpus: int = 8, *, label: str = "nvidia.com/gpu.product", **spec: Any) -> Any:
    return {
        "metadata": {"labels": {label: kind} if kind else {}},
        "spec": spec,
        "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}},
    }


def found(monkeypatch: pytest.MonkeyPatch, *nodes: Any, **selector: str) -> QueueGpus:
    class Server:
        host, context = "server", "prod"

        def __init__(self, keys: Kubernetes) -> None:
            pass

        def request(self, method: str, path: str, **query: Any) -> dict[str, Any]:
            return {"items": [*nodes]}

    monkeypatch.setattr(machines, "Client", Server)
    return machines.gpus(Kubernetes("train:1", node_selector=selector))


def test_only_machines_that_a_job_may_get_count(monkeypatch: pytest.MonkeyPatch) -> None:
    label = "nvidia.com/gpu.product"
    nodes = (
        machine("NVIDIA-L4", 1),
        machine("NVIDIA-H200", unschedulable=True),
        machine("NVIDIA-H200", 0),
        machine("NVIDIA-H100-80GB-HBM3"),
        machine("NVIDIA-H100-80GB-HBM3"),
        machine("", 4),
    )
    every = found(monkeypatch, *nodes)
    assert every.where == "the cluster prod"
    assert (every.types, every.per_host) == (("NVIDIA-H100-80GB-HBM3", "NVIDIA-L4"), 8)
    small = found(monkeypatch, *nodes, **{label: "NVIDIA-L4"})
    assert (small.types, small.per_host) == (("NVIDIA-L4",), 1)


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}, "a100-40gb"),
        ({"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}, "nvidia-a100-80gb"),
        (
            {
                "karpenter.k8s.aws/instance-gpu-name": "a100",
                "karpenter.k8s.aws/instance-gpu-memory": "40960",
            },
            "a100-40gb",
        ),
        ({"eks.amazonaws.com/instance-gpu-name": "h100"}, "h100"),
        ({"gpu.nvidia.com/class": "H100_NVLINK_80GB"}, "H100_NVLINK_80GB"),
    ],
)
def test_names_of_clouds(
    monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], name: str
) -> None:
    node = machine("")
    node["metadata"]["labels"] = labels
    assert found(monkeypatch, node).types == (name,)
    assert hardware().gpu(name)


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", {}),
        ("Tesla-T4-SHARED", {}),
        ("", {"cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"}),
    ],
)
def test_parts_of_gpus_do_not_count(
    monkeypatch: pytest.MonkeyPatch, kind: str, labels: dict[str, str]
) -> None:
    node = machine(kind)
    node["metadata"]["labels"].update(labels)
    assert found(monkeypatch, node).per_host == 0


def test_a_first_file_tolerates_the_taint_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    found(monkeypatch, machine("NVIDIA-H200", taints=[taint]))
    vendor, alike = machines.with_gpus()
    answers = KubernetesAnswers("train:1", 2, None, "torch", "train.py")
    keys = parse(text(answers, alike, vendor), "first.yaml").cluster.kubernetes
    assert keys is not None
    assert keys.tolerations == ("nvidia.com/gpu",)
