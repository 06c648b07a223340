"""What the ClusterTrainingRuntime of a TrainJob adds to its pods, as far as it can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from dtrain.diagnostics import PrepareError
from dtrain.engines.kubernetes.client import Client
from dtrain.engines.kubernetes.kinds import TRAINJOB
from dtrain.engines.kubernetes.objects import Word, at
from dtrain.launchplan.pods import REPLICATED_JOB
from dtrain.messages.decode import decode
from dtrain.records import dataclass
from dtrain.spec.model import Kubernetes

PATH = f"/apis/{TRAINJOB.api_version}/clustertrainingruntimes"
_UNSEEN = {"volumes": "volumes", "initContainers": "init containers"}
"""Fields of a pod that may bring code or programs, and that a check does not use."""
_Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingRuntime:
    """The part for the pods that train."""

    pod: Mapping[str, Any] = field(default_factory=dict)
    """The specification of the pods, as the server has it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables whose values are in the runtime itself."""
    folders: tuple[str, ...] = ()
    """Folders of the container where volumes are mounted."""
    unseen: str = ""
    """What a check of the image does not know; empty if it knows all."""


def read(client: Client, keys: Kubernetes) -> TrainingRuntime | None:
    """None if the job is a JobSet. Raises ConnectError, AuthError and ProtocolError."""
    if keys.api != "trainjob":
        return None
    try:
        answer = client.request("GET", f"{PATH}/{keys.runtime}")
    except PrepareError:
        unseen = f"the runtime {keys.runtime}, which you may not read,"
        return TrainingRuntime(unseen=unseen)
    return parsed(answer, keys.runtime)


def parsed(value: Any, name: str) -> TrainingRuntime:
    """Raises ProtocolError. Pure."""
    jobs = at(value, "spec.template.spec.replicatedJobs", tuple[_Object, ...]) or ()
    named = (one for one in jobs if one.get("name") == REPLICATED_JOB)
    pod = at(next(named, {}), "template.spec.template.spec", _Object) or {}
    parts = decode(_PodParts, pod, "pod")
    mine = (one for one in parts.containers if one.name == REPLICATED_JOB)
    container = next(mine, _Container())
    unseen = [text for key, text in _UNSEEN.items() if pod.get(key)]
    if container.envFrom or any(one.valueFrom for one in container.env):
        unseen.append("variables from other objects")
    return TrainingRuntime(
        pod,
        {one.name: one.value for one in container.env if one.name and not one.valueFrom},
        tuple(one.mountPath for one in container.volumeMounts),
        f"what the runtime {name} adds ({', '.join(unseen)})" if unseen else "",
    )


_PLACING = (
    *("affinity", "imagePullSecrets", "nodeSelector", "runtimeClassName", "schedulerName"),
    *("securityContext", "serviceAccountName", "tolerations"),
)


def placing(runtime: TrainingRuntime | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a pod that decide where and how its image runs: those of the runtime, changed
    by the job's ``own`` as Trainer does it. Maps and pull secrets are merged, and other values of
    the job replace those of the runtime. Pure."""
    base = runtime.pod if runtime is not None else {}
    found = {key: each[key] for each in (base, own) for key in _PLACING if key in each}
    for key in ("nodeSelector", "securityContext"):
        if key in base and key in own:
            found[key] = {**base[key], **own[key]}
    key = "imagePullSecrets"
    if key in base and key in own:
        found[key] = [*base[key], *(one for one in own[key] if one not in base[key])]
    return found


@dataclass(frozen=True, slots=True)
class _Variable:
    name: Word = ""
    value: str = ""
    valueFrom: Mapping[str, Any] | None = None  # noqa: N815 (Kubernetes)


@dataclass(frozen=True, slots=True)
class _Mount:
    mountPath: Word = ""  # noqa: N815 (Kubernetes)


@dataclass(frozen=True, slots=True)
class _Container:
    name: Word = ""
    env: tuple[_Variable, ...] = ()
    envFrom: tuple[Mapping[str, Any], ...] = ()  # noqa: N815 (Kubernetes)
    volumeMounts: tuple[_Mount, ...] = ()  # noqa: N815 (Kubernetes)


@dataclass(frozen=True, slots=True)
class _PodParts:
    containers: tuple[_Container, ...] = ()
    imagePullSecrets: tuple[Mapping[str, Any], ...] = ()  # noqa: N815 (Kubernetes)
    nodeSelector: Mapping[str, Word] = field(default_factory=dict)  # noqa: N815 (Kubernetes)
    securityContext: Mapping[str, Any] = field(default_factory=dict)  # noqa: N815 (Kubernetes)
    tolerations: tuple[Mapping[str, Any], ...] = ()
