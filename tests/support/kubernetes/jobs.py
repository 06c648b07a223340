"""The Job controller: Indexed Jobs become pods."""

from __future__ import annotations

import copy
import uuid

from support.kubernetes import clock, quota
from support.kubernetes.deletion import delete
from support.kubernetes.errors import ApiError
from support.kubernetes.kinds import JOB, POD, Object
from support.kubernetes.store import Store, condition, owner_reference, set_condition

INDEX = "batch.kubernetes.io/job-completion-index"
FINALIZER = "batch.kubernetes.io/job-tracking"


def reconcile(store: Store) -> None:
    alive = set()
    for job in store.list(JOB):
        if "deletionTimestamp" not in job["metadata"]:
            alive.add(job["metadata"]["uid"])
            _reconcile(store, job)
    for pod in store.list(POD):
        meta = pod["metadata"]
        owners = {ref["uid"] for ref in meta.get("ownerReferences", ())}
        if FINALIZER in meta.get("finalizers", ()) and not owners & alive:
            forget(store, pod)


def finished(job: Object) -> str:
    """``Complete`` or ``Failed`` or nothing."""
    return next((type_ for type_ in ("Complete", "Failed") if condition(job, type_)), "")


def _reconcile(store: Store, job: Object) -> None:
    meta, spec = job["metadata"], job["spec"]
    place = (JOB, meta["namespace"], meta["name"])
    pods = store.owned(POD, job)
    job = _count(store, job, pods)
    active = [pod for pod in pods if pod["status"]["phase"] not in quota.FINISHED]
    ending = condition(job, "FailureTarget") or condition(job, "SuccessCriteriaMet")
    if finished(job) or ending or spec.get("suspend"):
        for pod in active:
            if "deletionTimestamp" not in pod["metadata"]:
                if spec.get("suspend"):
                    forget(store, pod)  # so that it does not count as a failure
                delete(store, POD, meta["namespace"], pod["metadata"]["name"], {})
    else:
        _create_pods(store, job, {_index(pod) for pod in active} | _completed(job))
    if ending and not active and not finished(job):
        type_ = "Failed" if ending["type"] == "FailureTarget" else "Complete"
        why = (ending["reason"], ending["message"])
        store.edit(*place, lambda it: set_condition(it, type_, *why))


def _count(store: Store, job: Object, pods: list[Object]) -> Object:
    """Count the pods that have ended, and let them be removed. The job with its new status."""
    spec, status = job["spec"], job.get("status", {})
    completed = _completed(job)
    failed = set(status.get("uncountedTerminatedPods", {}).get("failed", ()))
    ending = None
    for pod in pods:
        phase = pod["status"]["phase"]
        if phase not in quota.FINISHED or FINALIZER not in pod["metadata"].get("finalizers", ()):
            continue
        if phase == "Succeeded":
            completed.add(_index(pod))
        elif (action := _policy(spec.get("podFailurePolicy", {}), pod)) == "FailJob":
            ending = ("PodFailurePolicy", f"Pod {pod['metadata']['name']} matched a FailJob rule")
        elif action == "Count":
            failed.add(pod["metadata"]["uid"])
        forget(store, pod)
    if len(failed) > spec.get("backoffLimit", 6):
        ending = ("BackoffLimitExceeded", "Job has reached the specified backoff limit")
    active = [pod for pod in pods if pod["status"]["phase"] not in quota.FINISHED]
    done = len(completed) == spec.get("completions", 1) and not active

    def write(found: Object) -> None:
        found.setdefault("status", {}).update(
            active=sum("deletionTimestamp" not in pod["metadata"] for pod in active),
            terminating=sum("deletionTimestamp" in pod["metadata"] for pod in active),
            ready=sum(pod["status"]["phase"] == "Running" for pod in active),
            failed=len(failed),
            succeeded=len(completed),
            completedIndexes=",".join(map(str, sorted(completed))),
            uncountedTerminatedPods={"failed": sorted(failed)},
        )
        ends = ("Failed", "Complete", "FailureTarget", "SuccessCriteriaMet")
        if any(condition(found, type_) for type_ in ends):
            return
        if ending:
            set_condition(found, "FailureTarget", *ending)
        elif _suffices(spec.get("successPolicy", {}), completed):
            why = "Matched rules at index 0"
            set_condition(found, "SuccessCriteriaMet", "SuccessPolicy", why)
        elif done:
            why = "Reached expected number of succeeded pods"
            set_condition(found, "Complete", "CompletionsReached", why)
            found["status"]["completionTime"] = clock.now()

    return store.edit(JOB, job["metadata"]["namespace"], job["metadata"]["name"], write)


def _suffices(policy: Object, completed: set[int]) -> bool:
    for rule in policy.get("rules", ()):
        wanted: set[int] = set()
        for part in rule["succeededIndexes"].split(","):
            first, _, last = part.partition("-")
            wanted |= set(range(int(first), int(last or first) + 1))
        if len(wanted & completed) >= rule.get("succeededCount", len(wanted)):
            return True
    return False


def forget(store: Store, pod: Object) -> None:
    """A pod that has been counted may be removed."""
    meta = pod["metadata"]
    store.edit(
        POD, meta["namespace"], meta["name"], lambda it: it["metadata"].pop("finalizers", None)
    )


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _completed(job: Object) -> set[int]:
    text = job.get("status", {}).get("completedIndexes", "")
    return {int(index) for index in text.split(",") if index}


def _policy(policy: Object, pod: Object) -> str:
    codes = [
        status["state"]["terminated"]["exitCode"]
        for status in pod["status"].get("containerStatuses", ())
        if "terminated" in status.get("state", {})
    ]
    for rule in policy.get("rules", ()):
        wanted = rule.get("onExitCodes")
        if wanted:
            inside = [code in wanted["values"] for code in codes if code]
            if any(one == (wanted["operator"] == "In") for one in inside):
                return str(rule["action"])
        patterns = rule.get("onPodConditions", ())
        if any(condition(pod, pattern["type"]) for pattern in patterns):
            return str(rule["action"])
    return "Count"


def _create_pods(store: Store, job: Object, present: set[int]) -> None:
    meta, spec = job["metadata"], job["spec"]
    place = (JOB, meta["namespace"], meta["name"])
    room = spec.get("parallelism", 1) - len(present)
    missing = [index for index in range(spec.get("completions", 1)) if index not in present]
    if "startTime" not in job.get("status", {}):
        store.edit(*place, lambda it: it.setdefault("status", {}).update(startTime=clock.now()))
    for index in missing[: max(room, 0)]:
        pod = _pod(job, index)
        try:
            quota.check(store, pod)
        except ApiError as error:
            store.event(job, "FailedCreate", f"Error creating: {error}")
            continue
        pod["metadata"]["name"] += f"-{uuid.uuid4().hex[:5]}"
        pod["spec"]["containers"] += store.sidecars
        store.create(POD, pod)


def _pod(job: Object, index: int) -> Object:
    template = copy.deepcopy(job["spec"]["template"])
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    meta = template.setdefault("metadata", {})
    labels = {
        "batch.kubernetes.io/controller-uid": uid,
        "batch.kubernetes.io/job-name": name,
        "controller-uid": uid,
        "job-name": name,
        INDEX: str(index),
    }
    meta |= {
        "name": f"{name}-{index}",
        "generateName": f"{name}-{index}-",
        "namespace": job["metadata"]["namespace"],
        "labels": {**meta.get("labels", {}), **labels},
        "annotations": {**meta.get("annotations", {}), INDEX: str(index)},
        "ownerReferences": [owner_reference(job)],
        "finalizers": [FINALIZER],
    }
    pod = template["spec"]
    pod["hostname"] = f"{name}-{index}"
    path = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        env = container.setdefault("env", [])
        if not any(one["name"] == "JOB_COMPLETION_INDEX" for one in env):
            env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": path})
    return {**template, "status": {"phase": "Pending"}}
