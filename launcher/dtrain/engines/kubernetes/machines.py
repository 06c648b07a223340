"""The machines of a Kubernetes cluster, and their GPUs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

from dtrain.engines.kubernetes.client import Client
from dtrain.engines.kubernetes.manifest import GPUS, gpu_toleration, toleration
from dtrain.engines.kubernetes.objects import Condition, Word, at, object_list
from dtrain.engines.kubernetes.quantities import amount
from dtrain.messages.decode import answer_of
from dtrain.planning.request import QueueGpus
from dtrain.records import dataclass
from dtrain.spec.model import Kubernetes
from dtrain.wording import counted

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
_INSTANCE = "node.kubernetes.io/instance-type"
_INSTANCES = {
    "Standard_ND96asr_v4": "a100-40gb",
    "Standard_ND96amsr_A100_v4": "a100-80gb",
    "Standard_ND96isr_H100_v5": "h100-80gb",
    "Standard_ND96isr_H200_v5": "h200",
    "Standard_ND96isr_MI300X_v5": "mi300x",
    "p4d.24xlarge": "a100-40gb",
    "p4de.24xlarge": "a100-80gb",
    "p5.48xlarge": "h100-80gb",
    "p5e.48xlarge": "h200",
    "p5en.48xlarge": "h200",
    "p6-b200.48xlarge": "b200",
}
"""The GPUs of machines of Azure and AWS for training on several machines: without a device plugin
that labels them, only the type of the machine implies its GPU."""
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
_PARTITION_OF_AMD = "amd.com/compute-memory-partition"
"""Label of AMD's node labeller, such as ``cpx_nps4``. Only in the mode SPX is a device a GPU."""
_VALUE = re.compile("=[^:]*")
"""In a taint."""
_OTHERS = "not selected"
"""Of machines without the labels of ``kubernetes.node_selector``."""


@dataclass(frozen=True, slots=True)
class _Taint:
    key: Word = ""
    value: Word = ""
    effect: Word = ""

    def __str__(self) -> str:
        return f"{self.key}{'=' if self.value else ''}{self.value}:{self.effect}"

    def keeps_away(self, tolerations: Iterable[Mapping[str, str]]) -> bool:
        """Whether it keeps pods with these tolerations away."""
        return self.effect != "PreferNoSchedule" and not any(
            one.get("key", self.key) == self.key
            and one.get("value", self.value) == self.value
            and one.get("effect", self.effect) == self.effect
            for one in tolerations
        )


_CORDON = _Taint("node.kubernetes.io/unschedulable", effect="NoSchedule")


@dataclass(frozen=True, slots=True)
class KubernetesMachine:
    gpus: int
    """The whole GPUs that pods may ask for."""
    label: tuple[str, str] | None
    """The key and the value of the label with the type of its GPUs, if it has one."""
    gpu_type: str
    """Empty if it is not known."""
    obstacle: str = ""
    """Why the pods of the job cannot run on it, as a relative clause; empty if they can."""
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
            taints = at(machine, "spec.taints", tuple[_Taint, ...]) or ()
            other = _INSTANCE if labels.get(_INSTANCE) in _INSTANCES else ""
            key = next(filter(labels.get, _TYPE_LABELS), other)
            kind = labels.get(key, "")
            memory = labels.get(f"{key.removesuffix('name')}memory", "")
            partition = labels.get(_PARTITION_OF_AMD, "spx")
            parts = (
                _PARTS.search(kind)
                or any(map(labels.get, _PARTS_OF_GKE))
                or not partition.startswith("spx")
            )
            yield KubernetesMachine(
                0 if parts else int(amount(free)),
                (key, kind) if kind else None,
                _INSTANCES.get(kind) or _NAMES.get((kind, memory), kind),
                _obstacle(machine, keys, labels, taints),
                any(taint.key == resource for taint in taints),
            )
        if not page.next:
            return
        more = {"continue": page.next}


def _obstacle(
    machine: Any, keys: Kubernetes, labels: Mapping[str, str], taints: Iterable[_Taint]
) -> str:
    conditions = at(machine, "status.conditions", tuple[Condition, ...]) or ()
    if not keys.node_selector.items() <= labels.items():
        return _OTHERS
    tolerations = [gpu_toleration(keys), *map(toleration, keys.tolerations)]
    if at(machine, "spec.unschedulable", bool) and _CORDON.keeps_away(tolerations):
        return "cordoned"
    # Kubernetes taints a machine without this condition, too, and kubectl shows it as Unknown.
    if not any(one.type == "Ready" and one.status == "True" for one in conditions):
        return "not ready"
    # The queue's ResourceFlavor, and the runtime of a TrainJob, may add tolerations.
    if not keys.queue and keys.api == "jobset":
        for taint in taints:
            if taint.keeps_away(tolerations):
                return f"with the taint {taint}"
    return ""


def left_out(found: Iterable[KubernetesMachine]) -> str:
    """How many machines with whole GPUs do not count for the job, and why; empty if all count."""
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in found:
        if one.gpus and one.obstacle not in ("", _OTHERS):
            kinds[_VALUE.sub("", one.obstacle)][one.obstacle] += 1
    if not kinds:
        return ""
    # Each machine may have a value of its own.
    why = Counter(
        {kind if len(each) > 1 else next(iter(each)): each.total() for kind, each in kinds.items()}
    )
    reasons = ", ".join(f"{count} {obstacle}" for obstacle, count in why.most_common())
    return f"{counted(why.total(), 'machine')} with GPUs left out: {reasons}"


def _with_gpus(client: Client, keys: Kubernetes) -> list[KubernetesMachine]:
    """Those with whole GPUs. Raises NodeError."""
    with answer_of(client.host, "listing the machines"):
        return [one for one in machines(client, keys) if one.gpus]


def _usable(found: Iterable[KubernetesMachine]) -> list[KubernetesMachine]:
    return [one for one in found if not one.obstacle]


def with_gpus() -> tuple[Vendor, list[KubernetesMachine]]:
    """The vendor whose GPUs pods may use on most machines of the current context, and all machines
    with its GPUs. Raises UsageError without a kubeconfig, and NodeError."""
    client = Client(Kubernetes(""))
    found = {
        # A first file has this toleration if a machine needs it.
        vendor: _with_gpus(client, Kubernetes("", gpu_vendor=vendor, tolerations=(GPUS[vendor],)))
        for vendor in get_args(Vendor)
    }
    return max(found.items(), key=lambda each: (len(_usable(each[1])), len(each[1])))


def gpus(keys: Kubernetes) -> QueueGpus:
    """The GPUs that a job with these keys gets. Raises UsageError without a kubeconfig, and
    NodeError."""
    client = Client(keys)
    found = _with_gpus(client, keys)
    usable = _usable(found)
    types = Counter(one.gpu_type for one in usable if one.gpu_type)
    return QueueGpus(
        where=f"the cluster {client.context or client.host}",
        chosen_by="kubernetes.node_selector",
        types=tuple(kind for kind, _ in types.most_common()),
        per_host=max((one.gpus for one in usable), default=0),
        left_out=left_out(found),
    )


def _texts(value: Any, path: str) -> Mapping[str, str]:
    return at(value, path, dict[str, Word]) or {}
