"""The JobSet controller: JobSets become Jobs and a headless Service."""

from __future__ import annotations

import copy
import hashlib
import time

from support.kubernetes import clock, jobs
from support.kubernetes.deletion import delete
from support.kubernetes.kinds import JOB, JOBSET, SERVICE, Object
from support.kubernetes.store import Store, condition, owner_reference, set_condition

PREFIX = "jobset.sigs.k8s.io/"
ATTEMPT = f"{PREFIX}restart-attempt"
RESTART = "RestartJobSet"


def reconcile(store: Store) -> None:
    for jobset in store.list(JOBSET):
        if "deletionTimestamp" not in jobset["metadata"]:
            _reconcile(store, jobset)


def _reconcile(store: Store, jobset: Object) -> None:
    meta, spec = jobset["metadata"], jobset["spec"]
    place = (JOBSET, meta["namespace"], meta["name"])
    owned = store.owned(JOB, jobset)
    attempt = str(jobset.get("status", {}).get("restarts", 0))
    mine = [job for job in owned if job["metadata"]["labels"][ATTEMPT] == attempt]
    _count(store, jobset, mine)
    if condition(jobset, "Completed") or condition(jobset, "Failed"):
        _delete_jobs(store, [job for job in owned if not jobs.finished(job)])
        _expire(store, jobset)
        return
    if old := [job for job in owned if job not in mine]:
        _delete_jobs(store, old)
        return
    if spec.get("suspend"):
        store.edit(
            *place,
            lambda it: set_condition(it, "Suspended", "SuspendedJobs", "jobset is suspended"),
        )
        for job in mine:
            _suspend(store, job, suspend=True)
        return
    if condition(jobset, "Suspended"):
        store.edit(
            *place,
            lambda it: set_condition(
                it, "Suspended", "ResumeJobs", "jobset is resumed", status="False"
            ),
        )
    for job in mine:
        _suspend(store, job, suspend=False)
    _create(store, jobset, attempt, {job["metadata"]["name"] for job in mine})
    failed = [job for job in mine if condition(job, "Failed")]
    if failed:
        _handle_failure(store, jobset, failed)
    elif _succeeded(spec, mine):
        store.edit(
            *place,
            lambda it: _end(it, "Completed", "AllJobsCompleted", "jobset completed successfully"),
        )
        store.event(jobset, "AllJobsCompleted", "jobset completed successfully", "Normal")


def _succeeded(spec: Object, mine: list[Object]) -> bool:
    policy = spec["successPolicy"]
    wanted = policy.get("targetReplicatedJobs") or [one["name"] for one in spec["replicatedJobs"]]
    targets = [
        job for job in mine if job["metadata"]["labels"][f"{PREFIX}replicatedjob-name"] in wanted
    ]
    done = [bool(condition(job, "Complete")) for job in targets]
    return any(done) if policy["operator"] == "Any" else bool(done) and all(done)


def _handle_failure(store: Store, jobset: Object, failed: list[Object]) -> None:
    policy = jobset["spec"].get("failurePolicy")
    place = (JOBSET, jobset["metadata"]["namespace"], jobset["metadata"]["name"])
    first = min(failed, key=lambda job: job["metadata"]["name"])
    names = f"(first failed job: {first['metadata']['name']})"
    if policy is None:
        why = f"jobset failed due to one or more job failures {names}"
        store.edit(*place, lambda it: _end(it, "Failed", "FailedJobs", why))
        store.event(jobset, "FailedJobs", why)
        return
    action = _action(policy, first)
    counted = jobset.get("status", {}).get("restartsCountTowardsMax", 0)
    if action == "FailJobSet":
        why = f"applying FailJobSet failure policy action {names}"
        store.edit(*place, lambda it: _end(it, "Failed", "FailJobSetFailurePolicyAction", why))
        store.event(jobset, "FailJobSetFailurePolicyAction", why)
    elif action == RESTART and counted >= policy.get("maxRestarts", 0):
        why = f"jobset failed due to reaching max number of restarts {names}"
        store.edit(*place, lambda it: _end(it, "Failed", "ReachedMaxRestarts", why))
        store.event(jobset, "ReachedMaxRestarts", why)
    else:

        def restart(found: Object) -> None:
            status = found.setdefault("status", {})
            status["restarts"] = status.get("restarts", 0) + 1
            status["restartsCountTowardsMax"] = counted + (action == RESTART)

        store.edit(*place, restart)
        store.event(jobset, "Restarting", f"restarting jobset, attempt {counted + 1}", "Normal")


def _action(policy: Object, job: Object) -> str:
    reason = (condition(job, "Failed") or {})["reason"]
    name = job["metadata"]["labels"][f"{PREFIX}replicatedjob-name"]
    for rule in policy.get("rules", ()):
        reasons, targets = rule.get("onJobFailureReasons"), rule.get("targetReplicatedJobs")
        if (not reasons or reason in reasons) and (not targets or name in targets):
            return str(rule["action"])
    return RESTART


def _end(found: Object, type_: str, reason: str, why: str) -> None:
    set_condition(found, type_, reason, why)
    found["status"]["terminalState"] = type_


def _expire(store: Store, jobset: Object) -> None:
    seconds = jobset["spec"].get("ttlSecondsAfterFinished")
    end = condition(jobset, "Completed") or condition(jobset, "Failed") or {}
    if (
        seconds is not None
        and clock.parse(end["lastTransitionTime"]) / 1e9 + seconds <= time.time()
    ):
        meta = jobset["metadata"]
        delete(store, JOBSET, meta["namespace"], meta["name"], {"propagationPolicy": "Foreground"})


def _delete_jobs(store: Store, found: list[Object]) -> None:
    for job in found:
        meta = job["metadata"]
        if "deletionTimestamp" not in meta:
            delete(store, JOB, meta["namespace"], meta["name"], {"propagationPolicy": "Foreground"})


def _suspend(store: Store, job: Object, *, suspend: bool) -> None:
    meta = job["metadata"]
    store.edit(JOB, meta["namespace"], meta["name"], lambda it: it["spec"].update(suspend=suspend))


def _count(store: Store, jobset: Object, mine: list[Object]) -> None:
    counts = []
    for replicated in jobset["spec"].get("replicatedJobs", ()):
        name = replicated["name"]
        these = [
            job for job in mine if job["metadata"]["labels"][f"{PREFIX}replicatedjob-name"] == name
        ]
        counts.append(
            {
                "name": name,
                "ready": sum(_ready(job) for job in these),
                "succeeded": sum(bool(condition(job, "Complete")) for job in these),
                "failed": sum(bool(condition(job, "Failed")) for job in these),
                "active": sum(job.get("status", {}).get("active", 0) > 0 for job in these),
                "suspended": sum(bool(job["spec"].get("suspend")) for job in these),
            }
        )
    meta = jobset["metadata"]
    store.edit(
        JOBSET,
        meta["namespace"],
        meta["name"],
        lambda it: it.setdefault("status", {}).update(replicatedJobsStatus=counts),
    )


def _ready(job: Object) -> bool:
    status = job.get("status", {})
    done = status.get("ready", 0) + status.get("succeeded", 0)
    return bool(done >= min(job["spec"].get("parallelism", 1), job["spec"].get("completions", 1)))


def _create(store: Store, jobset: Object, attempt: str, present: set[str]) -> None:
    meta, spec = jobset["metadata"], jobset["spec"]
    subdomain = spec["network"].get("subdomain") or meta["name"]
    if not store.find(SERVICE, meta["namespace"], subdomain):
        service = {
            "metadata": {
                "name": subdomain,
                "namespace": meta["namespace"],
                "ownerReferences": [owner_reference(jobset)],
            },
            "spec": {"clusterIP": "None", "selector": {f"{PREFIX}jobset-name": meta["name"]}},
        }
        store.create(SERVICE, service)
    number = 0
    for replicated in spec.get("replicatedJobs", ()):
        for index in range(replicated["replicas"]):
            job = _job(jobset, replicated, index, number, attempt, subdomain)
            if job["metadata"]["name"] not in present:
                store.create(JOB, job)
            number += 1


def _job(
    jobset: Object, replicated: Object, index: int, number: int, attempt: str, subdomain: str
) -> Object:
    meta = jobset["metadata"]
    name = f"{meta['name']}-{replicated['name']}-{index}"
    every = jobset["spec"]["replicatedJobs"]
    labels = {
        f"{PREFIX}jobset-name": meta["name"],
        f"{PREFIX}jobset-uid": meta["uid"],
        f"{PREFIX}replicatedjob-name": replicated["name"],
        f"{PREFIX}replicatedjob-replicas": str(replicated["replicas"]),
        f"{PREFIX}global-replicas": str(sum(one["replicas"] for one in every)),
        f"{PREFIX}job-index": str(index),
        f"{PREFIX}job-global-index": str(number),
        f"{PREFIX}job-key": hashlib.sha256(f"{meta['namespace']}/{name}".encode()).hexdigest()[:40],
        ATTEMPT: attempt,
    }
    job = copy.deepcopy(replicated["template"])
    pod = job["spec"]["template"]
    for holder in (job.setdefault("metadata", {}), pod.setdefault("metadata", {})):
        for key in ("labels", "annotations"):
            holder[key] = {**holder.get(key, {}), **labels}
    job["metadata"] |= {
        "name": name,
        "namespace": meta["namespace"],
        "ownerReferences": [owner_reference(jobset)],
    }
    job["spec"]["suspend"] = False
    if jobset["spec"]["network"]["enableDNSHostnames"]:
        pod["spec"]["subdomain"] = subdomain
    return job
