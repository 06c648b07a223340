"""What is wrong with a manifest: by the published models, and by the rules of admission.

No cluster is at hand in the tests, so the rules that the webhooks of JobSet and Trainer, and the
API server itself, would apply are restated here, each with its source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import kubernetes_validate

Object = dict[str, Any]
KUBERNETES = "1.31"
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


def problems(found: Object) -> list[str]:
    """What an API server with JobSet and Kubeflow Trainer would refuse."""
    # Here, because each worker of pytest imports this file, and the models take 1.5 s.
    from kubeflow_trainer_api import models

    match found["kind"]:
        case "JobSet":
            return [*_model(models.JobsetV1alpha2JobSet, found), *_job_set(found)]
        case "TrainJob":
            return [*_model(models.TrainerV1alpha1TrainJob, found), *_train_job(found)]
        case _:
            return [*_built_in(found)]


def _model(kind: Any, found: Object) -> Iterator[str]:
    """The model drops fields that it does not know; the API server warns, and drops them, too."""
    kept = kind.from_dict(found).to_dict()
    yield from (f"unknown field {path}" for path in _missing(found, kept, ""))


def _missing(found: Any, kept: Any, path: str) -> Iterator[str]:
    if isinstance(found, dict):
        for key, value in found.items():
            if not isinstance(kept, dict) or key not in kept:
                yield f"{path}.{key}"
            else:
                yield from _missing(value, kept[key], f"{path}.{key}")
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from _missing(value, kept[number], f"{path}[{number}]")


def _built_in(found: Object) -> Iterator[str]:
    try:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield str(error)


def _job_set(found: Object) -> Iterator[str]:
    name = found["metadata"]["name"]
    rules: dict[str, Callable[[Object], bool]] = {
        # jobset pkg/webhooks/jobset_webhook.go: names become DNS-1035 labels of services.
        "the name is a DNS-1035 label": lambda _: bool(_LABEL.fullmatch(name)),
        # The same file: the longest generated pod name, with its random suffix, fits 63 characters.
        "pod names have at most 63 characters": lambda job: all(
            len(f"{name}-{one['name']}-{one.get('replicas', 1) - 1}-{_last(one)}-xxxxx") <= 63
            for one in job["replicatedJobs"]
        ),
        # The same file: the names of replicated jobs are unique DNS-1035 labels.
        "replicated jobs have unique names": lambda job: (
            len({one["name"] for one in job["replicatedJobs"]}) == len(job["replicatedJobs"])
        ),
        # jobset_types.go: MaxRestarts is an int32 of at least 0.
        "maxRestarts is not negative": lambda job: job["failurePolicy"]["maxRestarts"] >= 0,
    }
    yield from (rule for rule, holds in rules.items() if not holds(found["spec"]))
    for one in found["spec"]["replicatedJobs"]:
        template = one["template"]["spec"]
        yield from _job(template)
        wrapped = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{name}-{one['name']}-0"},
            "spec": template,
        }
        yield from _built_in(wrapped)


def _job(job: Object) -> Iterator[str]:
    pod = job["template"]["spec"]
    rules = {
        # kubernetes pkg/apis/batch/validation/validation.go, ValidateJobSpec.
        "an Indexed Job sets completions and parallelism": job["completionMode"] == "Indexed"
        and job["completions"] >= 1
        and 1 <= job["parallelism"] <= 100_000,
        # The same file: only Never and OnFailure.
        "restartPolicy is Never or OnFailure": pod["restartPolicy"] in ("Never", "OnFailure"),
        # The same file: successPolicy needs the Indexed mode and at most 20 rules.
        "successPolicy has at most 20 rules": len(job.get("successPolicy", {}).get("rules", []))
        <= 20,
    }
    yield from (rule for rule, holds in rules.items() if not holds)
    yield from _pod(pod)


def _pod(pod: Object) -> Iterator[str]:
    """kubernetes pkg/apis/core/validation/validation.go."""
    volumes = [volume["name"] for volume in pod.get("volumes", ())]
    if len(volumes) != len(set(volumes)):
        yield "volumes have unique names (ValidateVolumes)"
    for container in pod["containers"]:
        mounts = container.get("volumeMounts", ())
        if any(mount["name"] not in volumes for mount in mounts):
            yield "each mount names a volume (ValidateVolumeMounts)"
        paths = [mount["mountPath"] for mount in mounts]
        if len(paths) != len(set(paths)):
            yield "mount paths are unique (ValidateVolumeMounts)"
        limits = container.get("resources", {}).get("limits", {})
        requests = container.get("resources", {}).get("requests", {})
        for name in (name for name in requests if "/" in name):
            if requests[name] != limits.get(name):
                yield "a device has equal limits and requests (ValidateResourceRequirements)"
    for toleration in pod.get("tolerations", ()):
        if toleration["operator"] == "Exists" and "value" in toleration:
            yield "a toleration with Exists has no value (ValidateTolerations)"


def _last(replicated: Object) -> int:
    return int(replicated["template"]["spec"]["completions"]) - 1


def _train_job(found: Object) -> Iterator[str]:
    name, job = found["metadata"]["name"], found["spec"]
    rules = {
        # trainer pkg/apis/trainer/v1alpha1/trainjob_types.go: a CEL rule, as in RFC 1035.
        "the name is a DNS-1035 label": bool(_LABEL.fullmatch(name)),
        # The same file: the kinds of a runtime.
        "the runtime has a known kind": job["runtimeRef"]["kind"]
        in ("ClusterTrainingRuntime", "TrainingRuntime"),
        # trainer pkg/runtime/framework/plugins/torch/torch.go: reserved environment names.
        "PET_ variables are the runtime's": not any(
            one["name"].startswith("PET_") for one in job["trainer"]["env"]
        ),
    }
    yield from (rule for rule, holds in rules.items() if not holds)
    managers = [patch["manager"] for patch in job["runtimePatches"]]
    if len(managers) != len(set(managers)):  # trainjob_types.go: listType=map, key manager
        yield "patches have unique managers"
    for patch in job["runtimePatches"]:
        for one in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            for container in one["template"]["spec"]["template"]["spec"]["containers"]:
                # trainjob_types.go: a CEL rule of ContainerPatch.
                if container["name"] == "node" and "env" in container:
                    yield "the trainer sets env of the container node"
