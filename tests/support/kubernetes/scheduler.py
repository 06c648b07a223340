"""The scheduler: pods get nodes. A node runs one pod at a time, because pods have its address."""

from __future__ import annotations

from collections import Counter

from support.kubernetes import quota
from support.kubernetes.kinds import NODE, POD, Object
from support.kubernetes.store import Store, condition, set_condition


def reconcile(store: Store) -> None:
    for pod in store.list(POD):
        waits = pod["status"]["phase"] == "Pending" and not pod["spec"].get("nodeName")
        if waits and not pod["spec"].get("schedulingGates"):
            with store.changed:
                _schedule(store, pod)


def _schedule(store: Store, pod: Object) -> None:
    meta = pod["metadata"]
    busy = {one["spec"].get("nodeName") for one in quota.active(store)}
    reasons: Counter[str] = Counter()
    nodes = store.list(NODE)
    for node in nodes:
        reason = _refuses(node, pod, busy)
        if not reason:
            name, address = node["metadata"]["name"], node["status"]["addresses"][0]["address"]

            def bind(found: Object, name: str = name, address: str = address) -> None:
                found["spec"]["nodeName"] = name
                found["status"] |= {
                    "hostIP": address,
                    "podIP": address,
                    "podIPs": [{"ip": address}],
                }
                set_condition(found, "PodScheduled", "", "")

            store.edit(POD, meta["namespace"], meta["name"], bind)
            message = f"Successfully assigned {meta['namespace']}/{meta['name']} to {name}"
            store.event(pod, "Scheduled", message, "Normal")
            return
        reasons[reason] += 1
    why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    message = f"0/{len(nodes)} nodes are available: {why}."
    store.edit(
        POD,
        meta["namespace"],
        meta["name"],
        lambda it: set_condition(it, "PodScheduled", "Unschedulable", message, status="False"),
    )
    store.event(pod, "FailedScheduling", message)


def _refuses(node: Object, pod: Object, busy: set[str]) -> str:
    spec, labels = pod["spec"], node["metadata"]["labels"]
    taints = node["spec"].get("taints", [])
    tolerated = spec.get("tolerations", [])
    for taint in taints:
        if not any(_tolerates(one, taint) for one in tolerated):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    if not condition(node, "Ready"):
        return "node(s) were not ready"
    if any(labels.get(key) != value for key, value in spec.get("nodeSelector", {}).items()):
        return "node(s) didn't match Pod's node affinity/selector"
    room = node["status"]["allocatable"]
    for name, wanted in quota.requested(pod).items():
        if wanted > quota.amount(room.get(name, 0)):
            return f"Insufficient {name}"
    return "Too many pods" if node["metadata"]["name"] in busy else ""


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    exists = toleration.get("operator") == "Exists"
    return exists or toleration.get("value", "") == taint.get("value", "")
