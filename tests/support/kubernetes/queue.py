"""A queue in the manner of Kueue: what has the label of a queue stays suspended until released."""

from __future__ import annotations

from support.kubernetes.admission import QUEUE
from support.kubernetes.kinds import JOBSET, LOCAL_QUEUE, TRAINJOB, WORKLOAD, Kind, Object
from support.kubernetes.store import Store, owner_reference, set_condition


def reconcile(store: Store) -> None:
    """Make a Workload for each queued object."""
    for kind in (JOBSET, TRAINJOB):
        for one in store.list(kind):
            queue = one["metadata"].get("labels", {}).get(QUEUE)
            if queue and not store.owned(WORKLOAD, one):
                made = store.create(WORKLOAD, _workload(store, kind, one, queue))
                (waits,) = made["status"]["conditions"]
                store.event(made, waits["reason"], waits["message"])


def _workload(store: Store, kind: Kind, one: Object, queue: str) -> Object:
    meta = one["metadata"]
    workload: Object = {
        "metadata": {
            "name": f"{kind.name.lower()}-{meta['name']}-{meta['uid'][:5]}",
            "namespace": meta["namespace"],
            "labels": {"kueue.x-k8s.io/job-uid": meta["uid"]},
            "ownerReferences": [owner_reference(one)],
        },
        "spec": {"queueName": queue},
    }
    reason, why = "Pending", "couldn't assign flavors to pod set node: insufficient unused quota"
    if not store.find(LOCAL_QUEUE, meta["namespace"], queue):
        reason, why = "Inadmissible", f"LocalQueue {queue} doesn't exist"
    set_condition(workload, "QuotaReserved", reason, why, status="False")
    return workload


def release(store: Store, kind: Kind, namespace: str, name: str) -> None:
    one = store.get(kind, namespace, name)
    for workload in store.owned(WORKLOAD, one):

        def admit(found: Object) -> None:
            set_condition(found, "QuotaReserved", "QuotaReserved", "Quota reserved")
            set_condition(found, "Admitted", "Admitted", "The workload is admitted")
            set_condition(found, "Evicted", "QuotaReserved", "Previously: evicted", status="False")

        store.edit(WORKLOAD, namespace, workload["metadata"]["name"], admit)
    store.edit(kind, namespace, name, lambda it: it["spec"].update(suspend=False))


def preempt(store: Store, kind: Kind, namespace: str, name: str) -> None:
    """Suspend a job that runs, for another one."""
    one = store.get(kind, namespace, name)
    why = "Preempted to accommodate a workload (UID: 7) due to prioritization in the ClusterQueue"
    for workload in store.owned(WORKLOAD, one):

        def evict(found: Object) -> None:
            set_condition(found, "Evicted", "Preempted", why)
            set_condition(found, "Preempted", "InClusterQueue", why)
            set_condition(found, "QuotaReserved", "Pending", why, status="False")
            set_condition(found, "Admitted", "NoReservation", "No reservation", status="False")

        edited = store.edit(WORKLOAD, namespace, workload["metadata"]["name"], evict)
        store.event(edited, "Preempted", why, "Normal")
    store.edit(kind, namespace, name, lambda it: it["spec"].update(suspend=True))
