"""The launch plan as Kubernetes objects: a ConfigMap with the script, and a JobSet or a TrainJob.
Pure.

The fields are those of Kubernetes 1.31 and of the versions in `dtrain.engines.kubernetes.kinds`.
``kubectl apply`` runs the objects of a dry run; the cluster needs no dtrain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import yaml

from dtrain.engines.kubernetes import script
from dtrain.engines.kubernetes.kinds import JOBSET, TRAINJOB, keys_of, kubectl
from dtrain.engines.kubernetes.objects import RESTART_LABEL
from dtrain.launchplan.plan import LaunchPlan
from dtrain.launchplan.pods import REPLICATED_JOB, object_name
from dtrain.launchplan.shell import comment
from dtrain.spec.kubernetes_keys import TAINT
from dtrain.spec.model import Kubernetes

NAME = "job.yaml"
EXIT_SECONDS = 15
"""Seconds that a pod has after ``job.grace`` to end its processes and write its last lines."""
GPUS = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
MANAGER = {"app.kubernetes.io/managed-by": "dtrain"}

Object = dict[str, Any]


def render(plan: LaunchPlan) -> str:
    """The objects as YAML, for ``kubectl apply``."""
    name, keys = object_name(plan.name, ""), keys_of(plan)
    start = kubectl("apply", "-f", NAME, context=keys.context)
    head = [f"# Written by `dtrain launch --dry-run`. Start it: {comment(start)}"]
    if plan.job.secrets:
        secrets = ", ".join(plan.job.secrets)
        words = ("create", "secret", "generic", name, "--from-env-file=secrets.env")
        create = kubectl(*words, namespace=keys.namespace, context=keys.context)
        head += [
            f"# First create the Secret from a file with NAME=value lines for {secrets}:",
            f"#   {comment(create)}",
        ]
    if plan.job.sync is not None:
        head.append(
            f"# First add the files of job.sync to the ConfigMap: binaryData, key {script.SYNCED}"
        )
    documents = yaml.dump_all(
        objects(plan), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return "\n".join(head) + "\n" + documents


def objects(plan: LaunchPlan) -> list[Object]:
    """The ConfigMap and the job. ``plan.kubernetes`` must be set."""
    return [config_map(plan), job(plan)]


def config_map(plan: LaunchPlan, files: Mapping[str, str] | None = None) -> Object:
    """The ConfigMap with the script. ``files``: more files, as base64."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(plan),
        "data": {script.NAME: script.render(plan)},
        **({"binaryData": dict(files)} if files else {}),
    }


def secret(plan: LaunchPlan, values: Mapping[str, str]) -> Object:
    """The Secret with the values of ``job.secrets``. Only a launch creates it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(plan),
        "type": "Opaque",
        "stringData": dict(values),
    }


def job(plan: LaunchPlan) -> Object:
    """The JobSet or the TrainJob."""
    return _train_job(plan) if keys_of(plan).api == "trainjob" else _job_set(plan)


def _job_set(plan: LaunchPlan) -> Object:
    keys, count = keys_of(plan), len(plan.hosts)
    template: Object = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": 0,
        # After a suspension, a pod begins when the one before it has ended.
        "podReplacementPolicy": "Failed",
        "template": {
            "metadata": {"annotations": topology} if (topology := _topology(keys)) else {},
            "spec": pod_spec(plan),
        },
    }
    if serving := script.serving_pods(plan):
        working = [str(rank) for rank in range(count) if rank not in serving]
        template["successPolicy"] = {"rules": [{"succeededIndexes": ",".join(working)}]}
    return {
        "apiVersion": JOBSET.api_version,
        "kind": JOBSET.name,
        "metadata": _metadata(plan, _queue(keys)),
        "spec": {
            "failurePolicy": {"maxRestarts": plan.job.restart.max},
            "replicatedJobs": [
                {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": template}}
            ],
        },
    }


def _train_job(plan: LaunchPlan) -> Object:
    keys = keys_of(plan)
    pod = pod_spec(plan)
    (container,) = pod.pop("containers")
    patched = {
        key: container[key]
        for key in ("name", "securityContext", "volumeMounts")
        if key in container
    }
    del pod["restartPolicy"]
    template: Object = {"spec": {**pod, "containers": [patched]}}
    if topology := _topology(keys):
        template["metadata"] = {"annotations": topology}
    replicated = {"name": REPLICATED_JOB, "template": {"spec": {"template": template}}}
    return {
        "apiVersion": TRAINJOB.api_version,
        "kind": TRAINJOB.name,
        "metadata": _metadata(plan, _queue(keys)),
        "spec": {
            "runtimeRef": {"name": keys.runtime, "kind": "ClusterTrainingRuntime"},
            # Kueue starts it.
            **({"suspend": True} if keys.queue else {}),
            "trainer": {
                "image": container["image"],
                "command": container["command"],
                "env": container["env"],
                "numNodes": len(plan.hosts),
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [
                {
                    "manager": "dtrain.dev/launcher",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }


def pod(plan: LaunchPlan) -> Object:
    """One pod of the job, outside the job."""
    name = f"{object_name(plan.name, plan.run)}-pod"
    metadata = {**_metadata(plan), "name": name}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec(plan)}


def pod_spec(plan: LaunchPlan) -> Object:
    """What all pods of the job have in common."""
    keys = keys_of(plan)
    pod: Object = {"restartPolicy": "Never"}
    pod["terminationGracePeriodSeconds"] = ceil(plan.job.grace) + EXIT_SECONDS
    if keys.service_account:
        pod["serviceAccountName"] = keys.service_account
    if keys.priority:
        pod["priorityClassName"] = keys.priority
    if keys.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if keys.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in keys.pull_secrets]
    if keys.node_selector:
        pod["nodeSelector"] = dict(keys.node_selector)
    if keys.tolerations:
        pod["tolerations"] = [toleration(text) for text in keys.tolerations]
    context: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if keys.run_as_user is not None:
        context |= dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), keys.run_as_user)
        # Otherwise the kubelet changes the group of each file of a volume before each start.
        context["fsGroupChangePolicy"] = "OnRootMismatch"
        context["runAsNonRoot"] = True
    pod["securityContext"] = context
    pod["containers"] = [_container(plan)]
    pod["volumes"] = [volume for volume, _ in _volumes(plan)]
    return pod


def _container(plan: LaunchPlan) -> Object:
    keys = keys_of(plan)
    name = object_name(plan.name, plan.run)
    resources = dict(keys.resources)
    if gpus := len(plan.hosts[0].host.gpus):
        resources[GPUS[keys.gpu_vendor]] = str(gpus)
    restarts = {"fieldRef": {"fieldPath": f"metadata.labels['{RESTART_LABEL}']"}}
    capabilities: Object = {}
    if keys.run_as_user is not None:
        capabilities["drop"] = ["ALL"]
    if any(resource.startswith("rdma/") for resource in keys.resources):
        # RDMA pins memory.
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "name": REPLICATED_JOB,
        "image": keys.image,
        "command": ["bash", f"{script.FILES}/{script.NAME}"],
        "env": [
            {"name": script.RESTARTS, "valueFrom": restarts},
            *(
                {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
                for key in plan.job.secrets
            ),
        ],
        **({"ports": ports} if (ports := _ports(plan)) else {}),
        # What a pod gets of a device is what it asks for.
        "resources": {"limits": resources, "requests": resources} if resources else {},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            **({"capabilities": capabilities} if capabilities else {}),
        },
        "volumeMounts": [mount for _, mount in _volumes(plan)],
    }


def _ports(plan: LaunchPlan) -> list[Object]:
    """Keeps two pods that listen on the same ports of their machine apart. All pods have the same
    ports here, so a port of the first pod alone is left out: the others may share its machine."""
    if not keys_of(plan).host_network:
        return []
    return [{"containerPort": port, "hostPort": port} for port in script.common_ports(plan)]


def _volumes(plan: LaunchPlan) -> Iterator[tuple[Object, Object]]:
    """Each volume, with its place in the container."""
    keys = keys_of(plan)
    yield (
        {"name": "dtrain-files", "configMap": {"name": object_name(plan.name, plan.run)}},
        {"name": "dtrain-files", "mountPath": script.FILES, "readOnly": True},
    )
    yield (
        {"name": "dtrain-run", "emptyDir": {}},
        {"name": "dtrain-run", "mountPath": script.FOLDER},
    )
    limit = {"sizeLimit": keys.shm} if keys.shm else {}
    yield (
        # NCCL and the workers of data loaders share memory.
        {"name": "dtrain-shm", "emptyDir": {"medium": "Memory", **limit}},
        {"name": "dtrain-shm", "mountPath": "/dev/shm"},  # noqa: S108 (inside the container)
    )
    for kind, texts in (("claim", keys.claims), ("host", keys.host_paths)):
        for number, text in enumerate(texts):
            source, folder, *read_only = text.split(":")
            only = {"readOnly": True} if read_only else {}
            volume: Object = {"hostPath": {"path": source}}
            if kind == "claim":
                volume = {"persistentVolumeClaim": {"claimName": source, **only}}
            name = {"name": f"{kind}-{number}"}
            yield {**name, **volume}, {**name, "mountPath": folder, **only}


def toleration(text: str) -> Object:
    """Of the taint ``KEY[=VALUE][:EFFECT]``."""
    found = TAINT.fullmatch(text)
    parts = found.groupdict() if found else {}
    toleration: Object = {"key": parts["key"]} if parts.get("key") else {}
    if parts.get("value") is None:
        toleration["operator"] = "Exists"
    else:
        toleration |= {"operator": "Equal", "value": parts["value"]}
    return toleration | ({"effect": parts["effect"]} if parts.get("effect") else {})


def gpu_toleration(keys: Kubernetes) -> Object:
    """What most clusters add to pods that ask for GPUs (ExtendedResourceToleration)."""
    return toleration(f"{GPUS[keys.gpu_vendor]}:NoSchedule")


def _topology(keys: Kubernetes) -> Mapping[str, str]:
    if keys.topology is None:
        return {}
    return {"kueue.x-k8s.io/podset-required-topology": keys.topology}


def _queue(keys: Kubernetes) -> Mapping[str, str]:
    return {} if keys.queue is None else {"kueue.x-k8s.io/queue-name": keys.queue}


def _metadata(plan: LaunchPlan, labels: Mapping[str, str] | None = None) -> Object:
    keys = keys_of(plan)
    return {
        "name": object_name(plan.name, plan.run),
        **({"namespace": keys.namespace} if keys.namespace else {}),
        "labels": {**MANAGER, **(labels or {})},
    }


_NO_TEXT = re.compile("[yYnN]|[-+.0-9][-+.0-9eEo]*")
"""Text that kubectl reads as a number or a truth value, and PyYAML does not."""


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else "'" if _NO_TEXT.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
