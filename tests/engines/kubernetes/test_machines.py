"""The GPUs of a cluster's machines, for a plan."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.engines.kubernetes import machines
from dtrain.planning.request import QueueGpus
from dtrain.spec.model import Kubernetes


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
    ("kind", "name"), [("nvidia-tesla-a100", "a100-40gb"), ("nvidia-a100-80gb", "nvidia-a100-80gb")]
)
def test_a_name_of_gke(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    node = machine(kind, label="cloud.google.com/gke-accelerator")
    assert found(monkeypatch, node).types == (name,)
