"""The machines of a Kubernetes cluster, and their GPUs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from dtrain.engines.kubernetes.client import Client
from dtrain.engines.kubernetes.manifest import GPUS
from dtrain.engines.kubernetes.objects import Word, at, object_list
from dtrain.engines.kubernetes.quantities import amount
from dtrain.messages.decode import answer_of
from dtrain.planning.request import QueueGpus
from dtrain.records import dataclass
from dtrain.spec.model import Kubernetes

Vendor = Literal["nvidia", "amd"]
PAGE = 500
"""Machines in one answer: those of a large cluster would exceed `client.MAX_ANSWER`."""
_TYPE_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "beta.amd.com/gpu.product-name",
    "gpu.nvidia.com/model",
    "gpu.nvidia.com/class",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "eks.amazonaws.com/instance-gpu-name",
)
"""Labels with the type of a machine's GPUs: of the device plugins, CoreWeave, GKE, Karpenter on AWS
and EKS."""
_NAMES = {
    ("nvidia-tesla-a100", ""): "a100-40gb",
    ("nvidia-tesla-v100", ""): "v100-16gb",
    ("nvidia-h100-mega-80gb", ""): "h100-80gb",
    ("A100_NVLINK", ""): "a100-40gb",
    ("a100", "40960"): "a100-40gb",
    ("v100", "16384"): "v100-16gb",
}
"""The names of GKE, CoreWeave and AWS that mean another GPU elsewhere, or none. AWS labels the MiB
of memory, too."""
_PARTS = re.compile("-MIG-|-SHARED$")
"""In a type: each GPU that a pod may ask for is a part of one (MIG), or shared with other pods."""
_PARTS_OF_GKE = (
    "cloud.google.com/gke-gpu-partition-size",
    "cloud.google.com/gke-gpu-sharing-strategy",
)
"""Labels of such machines, with the type of the whole GPU."""


@dataclass(frozen=True, slots=True)
class KubernetesMachine:
    gpus: int
    """The whole GPUs that pods may ask for."""
    label: tuple[str, str] | None
    """The key and the value of the label with the type of its GPUs, if it has one."""
    gpu_type: str
    """Empty if it is not known."""
    usable: bool
    """Whether the pods of the job may run on it."""
    tainted: bool = False
    """Whether they must tolerate the taint that keeps other pods away from GPUs."""


def machines(client: Client, keys: Kubernetes) -> Iterator[KubernetesMachine]:
    """All machines, for a job with these keys. Raises NodeError and ProtocolError."""
    more: dict[str, Any] = {}
    while True:
        page = object_list(client.request("GET", "/api/v1/nodes", limit=PAGE, **more))
        for machine in page.items:
            labels = _texts(machine, "metadata.labels")
            resource = GPUS[keys.gpu_vendor]
            free = _texts(machine, "status.allocatable").get(resource, "0")
            taints = at(machine, "spec.taints", tuple[dict[str, Any], ...]) or ()
            key = next(filter(labels.get, _TYPE_LABELS), "")
            kind = labels.get(key, "")
            memory = labels.get(f"{key.removesuffix('name')}memory", "")
            parts = _PARTS.search(kind) or any(map(labels.get, _PARTS_OF_GKE))
            yield KubernetesMachine(
                0 if parts else int(amount(free)),
                (key, kind) if kind else None,
                _NAMES.get((kind, memory), kind),
                not at(machine, "spec.unschedulable", bool)
                and keys.node_selector.items() <= labels.items(),
                any(taint.get("key") == resource for taint in taints),
            )
        if not page.next:
            return
        more = {"continue": page.next}


def _usable(client: Client, keys: Kubernetes) -> list[KubernetesMachine]:
    """Those with whole GPUs that the job may get. Raises NodeError."""
    with answer_of(client.host, "listing the machines"):
        return [one for one in machines(client, keys) if one.usable and one.gpus]


def with_gpus() -> tuple[Vendor, list[KubernetesMachine]]:
    """The vendor of GPUs that most machines of the current context have, and these machines. Raises
    UsageError without a kubeconfig, and NodeError."""
    client = Client(Kubernetes(""))
    found = {
        vendor: _usable(client, Kubernetes("", gpu_vendor=vendor)) for vendor in get_args(Vendor)
    }
    return max(found.items(), key=lambda each: len(each[1]))


def gpus(keys: Kubernetes) -> QueueGpus:
    """The GPUs that a job with these keys gets. Raises UsageError without a kubeconfig, and
    NodeError."""
    client = Client(keys)
    usable = _usable(client, keys)
    types = Counter(one.gpu_type for one in usable if one.gpu_type)
    return QueueGpus(
        where=f"the cluster {client.context or client.host}",
        chosen_by="kubernetes.node_selector",
        types=tuple(kind for kind, _ in types.most_common()),
        per_host=max((one.gpus for one in usable), default=0),
    )


def _texts(value: Any, path: str) -> Mapping[str, str]:
    return at(value, path, dict[str, Word]) or {}
