"""What the API server and its webhooks do to an object before they store it."""

from __future__ import annotations

import re

from support.kubernetes import jobset_rules, quota, schema
from support.kubernetes.errors import ApiError, invalid
from support.kubernetes.kinds import (
    CONFIG_MAP,
    JOBSET,
    POD,
    RUNTIME,
    SECRET,
    TRAINJOB,
    Kind,
    Object,
)
from support.kubernetes.store import Store

QUEUE = "kueue.x-k8s.io/queue-name"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
RESERVED = {
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
}
LARGEST = 1024 * 1024
"""Bytes of a Secret's or ConfigMap's data, as the API server limits them."""


def admit(store: Store, kind: Kind, wanted: Object, *, strict: bool) -> None:
    """Check a new object and set its defaults. Raises ApiError."""
    _check(kind, wanted, strict=strict)
    if kind in (JOBSET, TRAINJOB) and QUEUE in wanted["metadata"].get("labels", {}):
        wanted["spec"]["suspend"] = True
    if kind == TRAINJOB:
        _check_trainjob(store, wanted)
    elif kind == POD:
        wanted["spec"].setdefault("restartPolicy", "Always")
        wanted["status"] = {"phase": "Pending"}
        quota.check(store, wanted)


def admit_update(kind: Kind, before: Object, after: Object, *, strict: bool) -> None:
    """Raises ApiError."""
    _check(kind, after, strict=strict)
    old, new = before["metadata"], after["metadata"]
    sent = new.get("resourceVersion", old["resourceVersion"])
    if sent != old["resourceVersion"]:
        what = f'Operation cannot be fulfilled on {kind.resource} "{new["name"]}"'
        message = f"{what}: the object has been modified"
        raise ApiError(409, "Conflict", message)
    if kind == JOBSET:
        jobset_rules.check_update(before, after)
    if kind in (CONFIG_MAP, SECRET) and before.get("immutable"):
        raise invalid(
            kind, new["name"], ["data: Forbidden: field is immutable when `immutable` is set"]
        )


def _check(kind: Kind, wanted: Object, *, strict: bool) -> None:
    schema.check(kind, wanted, strict=strict)
    if kind == JOBSET:
        jobset_rules.set_defaults(wanted)
        jobset_rules.check(wanted)
    name = wanted["metadata"].get("name", "")
    if name and (len(name) > 253 or not NAME.fullmatch(name)):
        message = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric"
        raise invalid(kind, name, [f'metadata.name: Invalid value: "{name}": {message}'])
    if kind in (CONFIG_MAP, SECRET):
        data = {**wanted.get("data", {}), **wanted.get("binaryData", {})}
        bad = [f'data[{key}]: Invalid value: "{key}"' for key in data if not KEY.fullmatch(key)]
        if sum(len(value) for value in data.values()) > LARGEST:
            bad.append(f"data: Too long: may not be more than {LARGEST} bytes")
        if bad:
            raise invalid(kind, name, bad)


def _check_trainjob(store: Store, wanted: Object) -> None:
    name, spec = wanted["metadata"]["name"], wanted["spec"]
    if not jobset_rules.LABEL.fullmatch(name) or len(name) > 63:
        raise invalid(TRAINJOB, name, ["metadata.name: must be a DNS-1035 label"])
    runtime = spec["runtimeRef"]["name"]
    if store.find(RUNTIME, "", runtime) is None:
        what = f'ClusterTrainingRuntime.trainer.kubeflow.org "{runtime}" not found'
        raise invalid(TRAINJOB, name, [f"spec.runtimeRef: Invalid value: {what}"])
    trainer = spec.get("trainer", {})
    reserved = sorted(RESERVED & {one["name"] for one in trainer.get("env", ())})
    if reserved and "numProcPerNode" in trainer:
        what = f"must not have reserved envs, invalid envs configured: {reserved}"
        raise invalid(TRAINJOB, name, [f"spec.trainer.env: Invalid value: {what}"])
