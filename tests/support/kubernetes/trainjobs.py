"""The Trainer: a TrainJob and its runtime become a JobSet of the same name.

Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go for the variables.
"""

from __future__ import annotations

import copy

from support.kubernetes import jobset_rules
from support.kubernetes.jobs import INDEX
from support.kubernetes.kinds import JOBSET, RUNTIME, TRAINJOB, Object
from support.kubernetes.requests import merge
from support.kubernetes.store import Store, condition, owner_reference, set_condition

NODE = "node"
"""The replicated job and the container that the Trainer changes."""
ENDS = {"Completed": "Complete", "Failed": "Failed"}
TORCH = {
    "metadata": {
        "name": "torch-distributed",
        "labels": {"trainer.kubeflow.org/framework": "torch"},
    },
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {"numProcPerNode": "auto"}},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": NODE,
                        "template": {
                            "metadata": {
                                "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                            },
                            "spec": {
                                "template": {
                                    "spec": {
                                        "containers": [{"name": NODE, "image": "pytorch:2.13"}]
                                    }
                                }
                            },
                        },
                    }
                ]
            }
        },
    },
}
"""A runtime that every Trainer brings."""


def reconcile(store: Store) -> None:
    for job in store.list(TRAINJOB):
        meta = job["metadata"]
        if "deletionTimestamp" in meta:
            continue
        jobset = store.find(JOBSET, meta["namespace"], meta["name"])
        suspend = job["spec"].get("suspend", False)
        if jobset is None:
            if not any(condition(job, end) for end in ENDS.values()):
                store.create(JOBSET, _jobset(store, job))
            continue
        place = (JOBSET, meta["namespace"], meta["name"])
        store.edit(*place, lambda it, value=suspend: it["spec"].update(suspend=value))
        _report(store, job, jobset)


def _report(store: Store, job: Object, jobset: Object) -> None:
    suspended = job["spec"].get("suspend", False)

    def report(found: Object) -> None:
        if suspended:
            set_condition(found, "Suspended", "Suspended", "TrainJob is suspended")
        elif condition(found, "Suspended"):
            set_condition(found, "Suspended", "Resumed", "TrainJob is resumed", status="False")
        for theirs, ours in ENDS.items():
            if end := condition(jobset, theirs):
                set_condition(found, ours, end["reason"], end["message"])
        counts = jobset.get("status", {}).get("replicatedJobsStatus", [])
        found.setdefault("status", {})["jobsStatus"] = counts

    store.edit(TRAINJOB, job["metadata"]["namespace"], job["metadata"]["name"], report)


def _jobset(store: Store, job: Object) -> Object:
    meta, trainer = job["metadata"], job["spec"].get("trainer", {})
    runtime = store.get(RUNTIME, "", job["spec"]["runtimeRef"]["name"])["spec"]
    template = copy.deepcopy(runtime["template"])
    for patch in job["spec"].get("runtimePatches", ()):
        change = patch.get("trainingRuntimeSpec", {}).get("template", {})
        template = merge(template, change, lists=True)
    policy = runtime.get("mlPolicy", {})
    nodes = trainer.get("numNodes") or policy.get("numNodes", 1)
    for replicated in template["spec"]["replicatedJobs"]:
        if replicated["name"] == NODE:
            spec = replicated["template"]["spec"]
            spec |= {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
            for container in spec["template"]["spec"]["containers"]:
                if container["name"] == NODE:
                    _set_trainer(container, trainer, policy, meta["name"], nodes)
    template["spec"]["suspend"] = job["spec"].get("suspend", False)
    template["metadata"] = {
        **template.get("metadata", {}),
        "name": meta["name"],
        "namespace": meta["namespace"],
        "ownerReferences": [owner_reference(job)],
    }
    for key in ("labels", "annotations"):
        added = job["spec"].get(key, {})
        template["metadata"][key] = {**template["metadata"].get(key, {}), **added}
    jobset_rules.set_defaults(template)
    jobset_rules.check(template)
    return dict(template)


def _set_trainer(container: Object, trainer: Object, policy: Object, name: str, nodes: int) -> None:
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    env = {one["name"]: one for one in (*container.get("env", ()), *trainer.get("env", ()))}
    if "torch" in policy:
        processes = trainer.get("numProcPerNode", policy["torch"].get("numProcPerNode", "auto"))
        path = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        values = {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": str(processes),
            "PET_MASTER_ADDR": f"{name}-{NODE}-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
        env |= {key: {"name": key, "value": value} for key, value in values.items()}
        env["PET_NODE_RANK"] = {"name": "PET_NODE_RANK", "valueFrom": path}
    container["env"] = list(env.values())
