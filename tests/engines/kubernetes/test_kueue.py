"""Why Kueue holds a job back, in its own words."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.diagnostics import ConnectError
from dtrain.engines.kubernetes import kueue
from dtrain.engines.kubernetes.client import ForbiddenError, NotFoundError
from dtrain.messages.decode import ProtocolError

QUOTA = "insufficient unused quota for nvidia.com/gpu in flavor h100, 8 more needed"
PREEMPTED = "Preempted to accommodate a workload (UID: 7)"


def workload(*conditions: tuple[str, str, str, str], checks: Any = None) -> dict[str, Any]:
    keys = ("type", "status", "reason", "message")
    found = [dict(zip(keys, one, strict=True)) for one in conditions]
    return {"status": {"conditions": found, "admissionChecks": checks}}


EVICTED = ("Evicted", "True", "Preempted", PREEMPTED)
WAITS = ("QuotaReserved", "False", "Pending", QUOTA)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, ""),
        (workload(WAITS), f"Pending: {QUOTA}"),
        (
            workload(EVICTED, ("QuotaReserved", "False", "Pending", PREEMPTED)),
            f"Preempted: {PREEMPTED}",
        ),
        (workload(EVICTED, WAITS), f"Preempted: {PREEMPTED}; Pending: {QUOTA}"),
        (
            workload(
                ("QuotaReserved", "True", "QuotaReserved", "reserved"),
                ("Evicted", "False", "QuotaReserved", "Previously: preempted"),
                checks=[
                    {"name": "capacity", "state": "Pending", "message": "no machines yet"},
                    {"name": "budget", "state": "Ready", "message": ""},
                ],
            ),
            "admission check capacity is Pending: no machines yet",
        ),
    ],
)
def test_reasons(value: Any, reason: str) -> None:
    assert kueue.workload_reason(value) == reason


def test_a_hostile_workload_is_refused() -> None:
    with pytest.raises(ProtocolError):
        kueue.workload_reason({"status": {"conditions": "x"}})


def event(name: str, reason: str, message: str, time: str) -> dict[str, Any]:
    involved = {"kind": "Workload", "name": name}
    return {
        "involvedObject": involved, "reason": reason, "message": message, "lastTimestamp": time,
        "eventTime": None,
    }  # fmt: skip


EVENTS = (
    event("jobset-train-1a-0e5d1", "Pending", QUOTA, "2026-11-22T10:00:00Z"),
    event("jobset-train-1a-0e5d1", "EvictedDueToPreempted", PREEMPTED, "2026-11-22T10:05:00Z"),
    event("jobset-train-1a-0e5d1", "Admitted", "admitted", "2026-11-22T10:06:00Z"),
    event("jobset-train-2b-0e5d1", "Pending", "of another job", "2026-11-22T10:07:00Z"),
)


class Server:
    host = "10.0.0.1"

    def __init__(self, *versions: str, error: Exception | None = None) -> None:
        self._versions = versions
        self._error = error
        self.asked: list[str] = []

    def request(self, method: str, path: str, **query: Any) -> dict[str, Any]:
        self.asked.append(path)
        if path == "/apis/kueue.x-k8s.io":
            if not self._versions:
                raise NotFoundError(self.host, path, "not found")
            return {"versions": [{"version": one} for one in self._versions]}
        if path.endswith("/events"):
            assert query == {"fieldSelector": "involvedObject.kind=Workload"}
            return {"items": list(EVENTS)}
        assert query == {"labelSelector": "kueue.x-k8s.io/job-uid=u-1"}
        if self._error is not None:
            raise self._error
        return {"items": [workload(WAITS)]}


@pytest.mark.parametrize(
    ("versions", "path"),
    [(("v1beta1",), "v1beta1"), (("v1beta2", "v1beta1", "v9"), "v1beta2"), (("v1",), "v1")],
)
def test_the_newest_known_version_is_asked_now_and_then(
    versions: tuple[str, ...], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server: Any = Server(*versions)
    queue = kueue.Queue(server, "train-1a")
    for _ in range(3):
        assert queue.reason("u-1") == f"Pending: {QUOTA}"
    workloads = f"/apis/kueue.x-k8s.io/{path}/namespaces/{{namespace}}/workloads"
    assert server.asked == ["/apis/kueue.x-k8s.io", workloads]


def test_who_may_not_read_workloads_gets_the_last_event() -> None:
    server: Any = Server("v1beta1", error=ForbiddenError("10.0.0.1", "GET", "forbidden"))
    reason = kueue.Queue(server, "train-1a").reason("u-1")
    assert reason == f"EvictedDueToPreempted: {PREEMPTED}"


@pytest.mark.parametrize(
    "server",
    [Server(), Server("v9"), Server("v1", error=ConnectError("10.0.0.1", "GET", "refused"))],
)
def test_without_an_answer_there_is_no_reason(server: Any) -> None:
    assert kueue.Queue(server, "train-1a").reason("u-1") == ""
