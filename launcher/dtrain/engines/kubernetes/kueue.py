"""Why Kueue holds a job back: from its Workload, or else from the events about it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from dtrain.diagnostics import NodeError
from dtrain.engines.kubernetes.client import Client, ForbiddenError, NotFoundError
from dtrain.engines.kubernetes.kinds import EVENTS
from dtrain.engines.kubernetes.objects import (
    Condition,
    KubernetesEvent,
    Sentence,
    Word,
    at,
    event,
    object_list,
    sentence,
)
from dtrain.messages.decode import ProtocolError
from dtrain.records import dataclass

GROUP = "kueue.x-k8s.io"
KNOWN_VERSIONS = ("v1beta1", "v1beta2", "v1")
"""Their Workloads have the same conditions."""
ASK_SECONDS = 5.0
"""Seconds between two questions for the reason."""
_OF_WORKLOADS = "involvedObject.kind=Workload"
_OF_JOB = f"{GROUP}/job-uid"
"""Label of a Workload with the uid of its job."""
_WAITING = ("Pending", "Inadmissible", "Preempted")
"""Reasons of events about a job that waits; beside them, all that begin with Evicted."""


def versions(client: Client, group: str) -> list[str]:
    """The versions of a group, such as that of JobSet, that the cluster serves. Raises NodeError,
    NotFoundError if it does not know the group, and ProtocolError."""
    answer = client.request("GET", f"/apis/{group}")
    found = at(answer, "versions", tuple[dict[str, Any], ...]) or ()
    return [at(one, "version", Word) or "" for one in found]


def served_path(client: Client) -> str:
    """The path of the newest version of Kueue's API that the cluster serves and dtrain knows.
    Raises NodeError, NotFoundError without one, and ProtocolError."""
    served = versions(client, GROUP)
    for version in reversed(KNOWN_VERSIONS):
        if version in served:
            return f"/apis/{GROUP}/{version}/namespaces/{{namespace}}"
    reason = f"{GROUP} has the versions {', '.join(sorted(served))}"
    raise NotFoundError(client.host, "asking for Kueue", reason)


class Queue:
    """The queue of one job. Only one thread uses it."""

    def __init__(self, client: Client, job: str) -> None:
        """``job``: name of the job."""
        self._client = client
        self._job = job
        self._path: str | None = None
        self._reason = ""
        self._due = 0.0

    def reason(self, uid: str) -> str:
        """Why the job with this uid waits; empty if the cluster does not say, or if the user may
        not read it."""
        if time.monotonic() < self._due:
            return self._reason
        self._due = time.monotonic() + ASK_SECONDS
        try:
            self._reason = self._ask(uid)
        except (NodeError, ProtocolError):
            self._reason = ""
        return self._reason

    def _ask(self, uid: str) -> str:
        try:
            if self._path is None:
                self._path = served_path(self._client)
            found = self._client.request(
                "GET", f"{self._path}/workloads", labelSelector=f"{_OF_JOB}={uid}"
            )
        except ForbiddenError:
            found = self._client.request("GET", EVENTS, fieldSelector=_OF_WORKLOADS)
            return event_reason(object_list(found).items, self._job)
        reasons = (workload_reason(one) for one in object_list(found).items)
        return next(filter(None, reasons), "")


@dataclass(frozen=True, slots=True)
class _Check:
    name: Word = ""
    state: Word = ""
    message: Sentence = ""


def workload_reason(value: Any) -> str:
    """Why a Workload waits: its eviction, what it lacks for quota, and its admission checks. Pure.
    Raises ProtocolError."""
    conditions = at(value, "status.conditions", tuple[Condition, ...]) or ()
    checks = at(value, "status.admissionChecks", tuple[_Check, ...]) or ()
    by_type = {one.type: one for one in conditions}
    reasons = []
    evicted, quota = by_type.get("Evicted"), by_type.get("QuotaReserved")
    if evicted is not None and evicted.status == "True":
        reasons.append(sentence(evicted.reason, evicted.message))
    if quota is not None and quota.status == "False":
        # After an eviction, it repeats the message until the next attempt to admit the job.
        if evicted is None or quota.message != evicted.message:
            reasons.append(sentence(quota.reason, quota.message))
    elif quota is not None:
        reasons += [
            sentence(f"admission check {check.name} is {check.state}", check.message)
            for check in checks
            if check.state != "Ready"
        ]
    return "; ".join(reasons)


def event_reason(values: tuple[Mapping[str, Any], ...], job: str) -> str:
    """Why a job waits, by the last event about its Workload. Pure. Raises ProtocolError."""
    # The name of a Workload: the kind and the name of its job, and a hash.
    names = tuple(f"{kind}-{job}-" for kind in ("jobset", "trainjob"))
    mine = [
        event(one)
        for one in values
        if (at(one, "involvedObject.name", Word) or "").startswith(names)
    ]
    waits = [one for one in mine if one.reason in _WAITING or one.reason.startswith("Evicted")]
    last = max(waits, key=lambda one: one.lastTimestamp or one.eventTime, default=KubernetesEvent())
    return sentence(last.reason, last.message)
