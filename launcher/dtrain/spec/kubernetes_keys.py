"""The keys below `cluster.kubernetes`: what a job asks of Kubernetes."""

from __future__ import annotations

import re

from dtrain.spec import value_rules as rules
from dtrain.spec.problems import Problems
from dtrain.spec.scalars import Check, Choice, Flag, Integer, Text
from dtrain.spec.schema import Field, ListOf, MapOf, Section, SectionType
from dtrain.spec.value_rules import matching

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED = rf"({_SUBDOMAIN}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?"
_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_QUANTITY = r"[0-9]{1,12}(\.[0-9]{1,3})?(m|k|[MGTP]|[KMGTP]i)?"
TAINT = re.compile(
    rf"((?P<key>{_QUALIFIED})(=(?P<value>{_VALUE}))?)?"
    r"(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
_PATH = r"/[^\s:,\"']*"
_CLAIM = re.compile(rf"{_SUBDOMAIN}:(?P<target>{_PATH})(:ro)?")
_HOST_PATH = re.compile(rf"{_PATH}:(?P<target>{_PATH})(:ro)?")

OWN_FOLDERS = ("/dtrain", "/etc/dtrain", "/dev/shm")  # noqa: S108 (inside the container)
"""Folders of the container that dtrain mounts itself."""


_object_name = matching(
    _SUBDOMAIN, "must be the name of an object: lower-case letters, digits, '-' and '.'"
)
_qualified = matching(_QUALIFIED, "must be a name such as gpu-type or topology.example.com/rack")
_resource = matching(_QUALIFIED, "must be the name of a resource, such as memory or rdma/hca")


def _toleration(text: str) -> str:
    if text and TAINT.fullmatch(text):
        return ""
    return "must be KEY, KEY:EFFECT or KEY=VALUE:EFFECT, such as nvidia.com/gpu:NoSchedule"


def _volume(pattern: re.Pattern[str], wrong: str) -> Check:
    def check(text: str) -> str:
        found = pattern.fullmatch(text)
        if found is None:
            return wrong
        target = found["target"].rstrip("/")
        if not target or target in OWN_FOLDERS:
            return f"cannot be mounted at {found['target']}, which the container needs"
        return ""

    return check


def _names(check: Check, advice: str) -> ListOf[str]:
    return ListOf(Text(check), unique=True, advice=advice)


KUBERNETES = SectionType(
    {
        "image": Field(
            Text(rules.one_word),
            "Image of the container, with bash, the framework and your code.",
            required=True,
            example="registry.example.com/team/train:1",
        ),
        "context": Field(
            Text(rules.option_safe),
            "Context of your kubeconfig.",
            otherwise="the current context; inside a pod, its service account",
            example="prod",
        ),
        "namespace": Field(
            Text(matching(_LABEL, "must be the name of a namespace")),
            "Namespace of the job.",
            otherwise="that of the context, else default",
            example="ml",
        ),
        "api": Field(
            Choice(("jobset", "trainjob")),
            "Kind of the job: a JobSet, or a TrainJob of Kubeflow Trainer.",
            default="jobset",
            example="trainjob",
        ),
        "runtime": Field(
            Text(_object_name),
            "ClusterTrainingRuntime of a TrainJob.",
            otherwise="torch-distributed",
            example="torch-distributed",
        ),
        "queue": Field(
            Text(_object_name),
            "LocalQueue of Kueue.",
            otherwise="none: the job starts without a queue",
            example="gpu",
        ),
        "topology": Field(
            Text(_qualified),
            "Topology level that all pods must share, a label of machines that Kueue knows.",
            otherwise="none",
            example="cloud.provider.com/topology-rack",
        ),
        "priority": Field(
            Text(_object_name), "PriorityClass of the pods.", otherwise="none", example="high"
        ),
        "gpu_vendor": Field(
            Choice(("nvidia", "amd")),
            "Vendor of the GPUs: the job asks for `nvidia.com/gpu` or `amd.com/gpu`.",
            default="nvidia",
            example="amd",
        ),
        "resources": Field(
            MapOf(
                Text(matching(_QUANTITY, "must be a quantity, such as 16, 500m or 256Gi")),
                _resource,
                what="resources as NAME: QUANTITY",
            ),
            "Further resources of each pod, such as CPUs, memory and RDMA devices.",
            otherwise="none",
            example="{cpu: 32, memory: 256Gi, rdma/hca: 1}",
        ),
        "shm": Field(
            Text(matching(_QUANTITY, "must be a size, such as 64Gi")),
            "Size limit of /dev/shm, which uses the memory of the pod.",
            otherwise="no limit of its own",
            example="64Gi",
        ),
        "host_network": Field(
            Flag(),
            "Use the network of the machine: for RDMA without a network plugin.",
            default=False,
            example="true",
        ),
        "claims": Field(
            _names(
                _volume(_CLAIM, "must be CLAIM:FOLDER or CLAIM:FOLDER:ro, such as data:/data:ro"),
                'write each claim as its own item: ["data:/data:ro"]',
            ),
            "Persistent volume claims, each with its folder in the container.",
            otherwise="none",
            example='["data:/data:ro", "checkpoints:/checkpoints"]',
        ),
        "host_paths": Field(
            _names(
                _volume(_HOST_PATH, "must be FOLDER:FOLDER or FOLDER:FOLDER:ro, both absolute"),
                'write each folder as its own item: ["/mnt/nvme:/scratch"]',
            ),
            "Folders of the machines, each with its folder in the container.",
            otherwise="none",
            example='["/mnt/nvme:/scratch"]',
        ),
        "service_account": Field(
            Text(_object_name),
            "Service account of the pods.",
            otherwise="default",
            example="trainer",
        ),
        "pull_secrets": Field(
            _names(_object_name, "write the names of Secrets as a list"),
            "Secrets for pulling the image.",
            otherwise="those of the service account",
            example="[registry]",
        ),
        "tolerations": Field(
            _names(_toleration, 'write each taint as its own item: ["nvidia.com/gpu:NoSchedule"]'),
            "Taints of machines that the pods tolerate.",
            otherwise="none",
            example='["nvidia.com/gpu:NoSchedule", "team=ml:NoExecute"]',
        ),
        "node_selector": Field(
            MapOf(
                Text(matching(_VALUE, "must be the value of a label"), empty=True),
                _qualified,
                what="labels as NAME: VALUE",
            ),
            "Labels that the machines must have.",
            otherwise="none",
            example="{gpu-type: h100}",
        ),
        "run_as_user": Field(
            Integer(1, 2**31 - 1),
            "User id of the processes, which then have no capabilities. Files in volumes belong to "
            "the group of this number.",
            otherwise="the user of the image",
            example="1000",
        ),
    }
)

_JOBSET_ONLY = {
    "priority": "the TrainingRuntime sets it",
    "host_network": "the TrainingRuntime sets it",
}
"""Keys that a TrainJob cannot pass on: TrainJob v1alpha1 has no field for them."""
_OF_PODS = ("JOB_COMPLETION_INDEX", "DTRAIN_RESTARTS")
"""Variables of the containers, by which a pod knows its rank and its attempt."""
_OWN_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")


def check_kubernetes(section: Section, job: Section, problems: Problems) -> None:
    """Report keys that contradict each other."""
    _check_api(section, job, problems)
    if "topology" in section and "queue" not in section:
        problems.add(
            "cluster.kubernetes.topology has no effect without a queue: Kueue chooses by topology",
            section.key_place("topology"),
            "add queue, or remove topology",
        )
    for name in _OWN_RESOURCES:
        if name in section.get("resources", {}):
            problems.add(
                f"cluster.kubernetes.resources cannot contain {name}, which cluster.gpus sets",
                section.place("resources"),
                "remove it, and set cluster.gpus",
            )
    for name in _OF_PODS:
        if name in job.get("secrets", ()):
            problems.add(
                f"job.secrets cannot contain {name}, which Kubernetes sets for each pod",
                job.place("secrets"),
                "give your variable another name",
            )
    _check_volumes(section, problems)


def _check_api(section: Section, job: Section, problems: Problems) -> None:
    if section.get("api") == "trainjob":
        for key, instead in _JOBSET_ONLY.items():
            if key in section:
                problems.add(
                    f"a TrainJob cannot set cluster.kubernetes.{key}",
                    section.key_place(key),
                    f"remove it: {instead}; or use 'api: jobset'",
                )
        restart = job.section("restart")
        if restart.get("max"):
            problems.add(
                "a TrainJob cannot set job.restart.max",
                restart.key_place("max"),
                "remove it: the TrainingRuntime sets it; or use 'api: jobset'",
            )
        if job.get("success_policy") == "first_host":
            problems.add(
                "a TrainJob succeeds only when all its pods do, so it has no success_policy",
                job.place("success_policy"),
                "remove it, or use 'api: jobset'",
            )
    elif "runtime" in section:
        problems.add(
            "cluster.kubernetes.runtime has no effect, because the job is a JobSet",
            section.key_place("runtime"),
            "remove it, or set 'api: trainjob'",
        )


def _check_volumes(section: Section, problems: Problems) -> None:
    targets: set[str] = set()
    for key in ("claims", "host_paths"):
        for text in section.get(key, ()):
            target = text.split(":")[1].rstrip("/")
            if target in targets:
                problems.add(
                    f"two volumes are mounted at {target}",
                    section.place(key),
                    "mount each at a folder of its own",
                )
            targets.add(target)
