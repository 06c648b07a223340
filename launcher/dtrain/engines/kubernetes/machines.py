"""The machines of a Kubernetes cluster, and their GPUs."""

from __future__ import annotations

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
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
"""Labels with the type of a machine's GPUs: of the device plugins, of GKE and of Karpenter."""
_OF_GKE = {
    "nvidia-tesla-a100": "a100-40gb",
    "nvidia-tesla-v100": "v100-16gb",
    "nvidia-h100-mega-80gb": "h100-80gb",
}
"""The names of GKE that mean another GPU elsewhere, or none."""


@dataclass(frozen=True, slots=True)
class KubernetesMachine:
    gpus: int
    """Those that pods may ask for."""
    label: tuple[str, str] | None
    """The key and the value of the label with the type of its GPUs, if it has one."""
    usable: bool
    """Whether the pods of the job may run on it."""

    @property
    def gpu_type(self) -> str:
        """Empty if it is not known."""
        value = self.label[1] if self.label is not None else ""
        return _OF_GKE.get(value, value)


def machines(client: Client, keys: Kubernetes) -> Iterator[KubernetesMachine]:
    """All machines, for a job with these keys. Raises NodeError and ProtocolError."""
    more: dict[str, Any] = {}
    while True:
        page = object_list(client.request("GET", "/api/v1/nodes", limit=PAGE, **more))
        for machine in page.items:
            labels = _texts(machine, "metadata.labels")
            free = _texts(machine, "status.allocatable").get(GPUS[keys.gpu_vendor], "0")
            types = ((key, labels[key]) for key in _TYPE_LABELS if labels.get(key))
            yield KubernetesMachine(
                int(amount(free)),
                next(types, None),
                not at(machine, "spec.unschedulable", bool)
                and keys.node_selector.items() <= labels.items(),
            )
        if not page.next:
            return
        more = {"continue": page.next}


def _usable(client: Client, keys: Kubernetes) -> list[KubernetesMachine]:
    """Those with GPUs that the job may get. Raises NodeError."""
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
