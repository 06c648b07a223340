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
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def serve(monkeypatch: pytest.MonkeyPatch, *nodes: Any) -> None:
    class Server:
        host, context = "server", "prod"

        def __init__(self, keys: Kubernetes) -> None:
            pass

        def request(self, method: str, path: str, **query: Any) -> dict[str, Any]:
            return {"items": [*nodes]}

    monkeypatch.setattr(machines, "Client", Server)


def found(monkeypatch: pytest.MonkeyPatch, *nodes: Any, **selector: str) -> QueueGpus:
    serve(monkeypatch, *nodes)
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
    assert every.left_out == "1 machine with GPUs left out: 1 cordoned"
    assert small.left_out == ""


@pytest.mark.parametrize(
    ("taint", "tolerations", "tolerated"),
    [
        ({"key": "team", "value": "ml"}, ("team=ml",), True),
        ({"key": "team", "value": "ml"}, ("team=", "team=a", "team:NoExecute", "tea"), False),
        ({"key": "team"}, ("team=",), True),
        ({"key": "team", "effect": "NoExecute"}, (":NoExecute",), True),
        ({"key": "team"}, (":NoExecute",), False),
        # Clusters that add tolerations of GPUs add this effect.
        ({"key": "nvidia.com/gpu", "value": "present"}, (), True),
        ({"key": "nvidia.com/gpu", "effect": "NoExecute"}, (), False),
        ({"key": "amd.com/gpu"}, (), False),
    ],
)
def test_a_toleration_is_of_taints_as_in_kubernetes(
    monkeypatch: pytest.MonkeyPatch,
    taint: dict[str, str],
    tolerations: tuple[str, ...],
    tolerated: bool,
) -> None:
    serve(monkeypatch, machine("NVIDIA-L4", taints=[{"effect": "NoSchedule", **taint}]))
    gpus = machines.gpus(Kubernetes("train:1", tolerations=tolerations))
    assert (gpus.per_host == 8) is tolerated


def test_pods_may_tolerate_cordoned_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, machine("NVIDIA-L4", unschedulable=True))
    tolerations = ("node.kubernetes.io/unschedulable",)
    assert machines.gpus(Kubernetes("train:1", tolerations=tolerations)).per_host == 8


def test_a_first_file_is_for_the_gpus_that_pods_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    off = machine("AMD", unschedulable=True)
    off["status"]["allocatable"] = {"amd.com/gpu": "8"}
    tainted = machine("NVIDIA-L4", taints=[{"key": "nvidia.com/gpu", "effect": "NoExecute"}])
    serve(monkeypatch, off, off, tainted)
    vendor, found = machines.with_gpus()
    assert (vendor, [one.obstacle for one in found]) == ("nvidia", [""])


@pytest.mark.parametrize(
    ("keys", "left_out"),
    [
        ({}, "3 machines with GPUs left out: 2 with the taint team=ml:NoSchedule, 1 not ready"),
        ({"tolerations": ("team=ml:NoSchedule",)}, "1 machine with GPUs left out: 1 not ready"),
        ({"tolerations": ("team",)}, "1 machine with GPUs left out: 1 not ready"),
        # Its ResourceFlavor may have tolerations.
        ({"queue": "gpu"}, "1 machine with GPUs left out: 1 not ready"),
    ],
)
def test_taints_and_conditions_count(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], left_out: str
) -> None:
    ours = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
    soft = {"key": "spot", "effect": "PreferNoSchedule"}
    theirs = {"key": "team", "value": "ml", "effect": "NoSchedule"}
    off = machine("NVIDIA-L4", taints=[{"key": "node.kubernetes.io/x", "effect": "NoExecute"}])
    off["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    serve(
        monkeypatch,
        machine("NVIDIA-H200", taints=[ours, soft]),
        machine("NVIDIA-L4", taints=[theirs]),
        machine("NVIDIA-L4", taints=[theirs, ours]),
        off,
    )
    gpus = machines.gpus(Kubernetes("train:1", **keys))
    assert gpus.left_out == left_out
    assert len(gpus.types) == (2 if keys else 1)


def test_taints_with_a_value_for_each_machine_are_one_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [
        machine("L4", taints=[{"key": "owner", "value": f"team-{number}", "effect": "NoExecute"}])
        for number in range(3)
    ]
    new = machine("L4")
    new["status"]["conditions"] = []
    why = found(monkeypatch, *nodes, new).left_out
    reasons = "3 with the taint owner:NoExecute, 1 not ready"
    assert why == f"4 machines with GPUs left out: {reasons}"


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
        ({"node.kubernetes.io/instance-type": "Standard_ND96isr_H100_v5"}, "h100-80gb"),
        (
            {
                "node.kubernetes.io/instance-type": "p5.48xlarge",
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            },
            "NVIDIA-H100-80GB-HBM3",
        ),
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
        ("", {"amd.com/compute-memory-partition": "cpx_nps4"}),
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


def test_a_first_file_for_more_gpus_than_a_machine_has() -> None:
    label = ("nvidia.com/gpu.product", "NVIDIA-L4")
    small = machines.KubernetesMachine(1, label, label[1])
    answers = KubernetesAnswers("train:1", 2, 8, "torch", "train.py")
    written = text(answers, [small], "nvidia")
    assert "such machine" not in written
    assert "gpu: l4" not in written
    large = machines.KubernetesMachine(8, (label[0], "NVIDIA-H200"), "NVIDIA-H200")
    written = text(answers, [small, small, large], "nvidia")
    assert "the cluster has 1 such machine" in written
    assert "node_selector: {nvidia.com/gpu.product: NVIDIA-H200}" in written
