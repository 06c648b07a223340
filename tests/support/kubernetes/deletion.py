"""Deletion: grace periods, and what becomes of an object's dependents."""

from __future__ import annotations

import time

from support.kubernetes import clock
from support.kubernetes.kinds import JOB, JOBSET, POD, SECRET, SERVICE, TRAINJOB, Kind, Object
from support.kubernetes.quota import FINISHED
from support.kubernetes.store import Store

DEPENDENTS = [JOBSET, JOB, POD, SERVICE, SECRET, Kind("ConfigMap", "configmaps")]
FOREGROUND = "foregroundDeletion"
GRACE = 30


def delete(store: Store, kind: Kind, namespace: str, name: str, options: Object) -> Object:
    """What the server answers. Raises ApiError 404."""
    with store.changed:
        found = store.get(kind, namespace, name)
        if options.get("dryRun"):
            return found
        if kind == POD:
            return _delete_pod(store, found, options.get("gracePeriodSeconds"))
        policy = options.get("propagationPolicy", "Background")
        if policy == "Foreground" and kind in (TRAINJOB, JOBSET, JOB):
            return store.edit(kind, namespace, name, _in_foreground)
        if policy == "Orphan":
            _disown(store, found)
        store.remove(kind, namespace, name)
        details = {"name": name, "kind": kind.plural, "uid": found["metadata"]["uid"]}
        head = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return {**head, "details": details}


def _delete_pod(store: Store, pod: Object, grace: object) -> Object:
    meta = pod["metadata"]
    default = pod["spec"].get("terminationGracePeriodSeconds", GRACE)
    seconds = default if grace is None else int(str(grace))
    if not seconds or not pod["spec"].get("nodeName") or pod["status"]["phase"] in FINISHED:
        return finish(store, pod)

    def terminate(found: Object) -> None:
        _delete_within(found["metadata"], seconds)

    return store.edit(POD, meta["namespace"], meta["name"], terminate)


def finish(store: Store, pod: Object) -> Object:
    """Remove a pod that has ended, as soon as its finalizers permit."""

    def end(found: Object) -> None:
        _delete_within(found["metadata"], 0)

    return store.edit(POD, pod["metadata"]["namespace"], pod["metadata"]["name"], end)


def _delete_within(meta: Object, seconds: int) -> None:
    """The first request counts, with the shortest grace period."""
    known = meta.get("deletionGracePeriodSeconds", seconds)
    due = meta.get("deletionTimestamp")
    asked = clock.parse(due) // 10**9 - known if due else time.time()
    meta["deletionGracePeriodSeconds"] = grace = min(seconds, known)
    meta["deletionTimestamp"] = clock.at(asked + grace)


def _in_foreground(found: Object) -> None:
    found["metadata"]["deletionTimestamp"] = clock.now()
    found["metadata"]["finalizers"] = [FOREGROUND]


def _disown(store: Store, owner: Object) -> None:
    for kind in DEPENDENTS:
        for one in store.owned(kind, owner):
            meta = one["metadata"]
            store.edit(
                kind,
                meta["namespace"],
                meta["name"],
                lambda it: it["metadata"].pop("ownerReferences"),
            )


def collect(store: Store) -> None:
    """The garbage collector: delete what has lost its owners, and finish foreground deletions."""
    with store.changed:
        every = [(kind, one) for kind in (TRAINJOB, *DEPENDENTS) for one in store.list(kind)]
        owners = {one["metadata"]["uid"]: one["metadata"] for _, one in every}
        for kind, one in every:
            meta = one["metadata"]
            if "deletionTimestamp" in meta and kind == POD:
                continue
            refs = meta.get("ownerReferences", ())
            alive = [
                ref
                for ref in refs
                if "deletionTimestamp" not in owners.get(ref["uid"], {"deletionTimestamp": 1})
            ]
            if refs and not alive and "deletionTimestamp" not in meta:
                delete(
                    store,
                    kind,
                    meta["namespace"],
                    meta["name"],
                    {"propagationPolicy": "Foreground"},
                )
            elif FOREGROUND in meta.get("finalizers", ()) and not any(
                store.owned(dependent, one) for dependent in DEPENDENTS
            ):
                store.remove(kind, meta["namespace"], meta["name"])
