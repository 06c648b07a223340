"""Amounts of resources: what a pod requests, and what a ResourceQuota leaves."""

from __future__ import annotations

from support.kubernetes.errors import forbidden
from support.kubernetes.kinds import POD, QUOTA, Object
from support.kubernetes.store import Store

FINISHED = ("Succeeded", "Failed")
_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_UNITS |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def amount(quantity: object) -> float:
    text = str(quantity)
    digits = text.rstrip("mkMGTi" + "K")
    return float(digits) * _UNITS.get(text[len(digits) :], 1)


def requested(pod: Object) -> dict[str, float]:
    """The sum over the containers; a limit is the default of a request."""
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources", {})
        for name, quantity in {
            **resources.get("limits", {}),
            **resources.get("requests", {}),
        }.items():
            total[name] = total.get(name, 0) + amount(quantity)
    return total


def active(store: Store, namespace: str = "") -> list[Object]:
    pods = store.list(POD, namespace)
    return [pod for pod in pods if pod["status"]["phase"] not in FINISHED]


def check(store: Store, pod: Object) -> None:
    """Raises ApiError if the pod exceeds a quota of its namespace."""
    namespace = pod["metadata"]["namespace"]
    for quota in store.list(QUOTA, namespace):
        for name, hard in quota["spec"]["hard"].items():
            wants = _use(pod, name)
            used = sum(_use(one, name) for one in active(store, namespace))
            if wants and used + wants > amount(hard):
                why = (
                    f"exceeded quota: {quota['metadata']['name']}, requested: {name}={wants:g},"
                    f" used: {name}={used:g}, limited: {name}={hard}"
                )
                raise forbidden(POD, pod["metadata"].get("name", ""), why)


def _use(pod: Object, name: str) -> float:
    return 1 if name == "pods" else requested(pod).get(name.removeprefix("requests."), 0)


def count(store: Store) -> None:
    """Write what is used into each quota's status."""
    for quota in store.list(QUOTA):
        namespace, hard = quota["metadata"]["namespace"], quota["spec"]["hard"]
        pods = active(store, namespace)
        used = {name: f"{sum(_use(pod, name) for pod in pods):g}" for name in hard}
        status = {"hard": hard, "used": used}
        name = quota["metadata"]["name"]
        store.edit(QUOTA, namespace, name, lambda found, new=status: found.update(status=new))
