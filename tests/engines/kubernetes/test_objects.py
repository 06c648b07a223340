"""What dtrain reads of Kubernetes objects, which may be wrong or hostile."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.engines.kubernetes import objects
from dtrain.messages.decode import ProtocolError
from dtrain.runs.shown_state import ShownState

LABELS = {objects.INDEX_LABEL: "1", objects.RESTART_LABEL: "2"}


def pod(status: dict[str, Any], **spec: Any) -> objects.Pod:
    metadata = {"name": "a-node-0-1-xyz12", "uid": "u-1", "labels": LABELS}
    found = objects.pod({"metadata": metadata, "spec": spec, "status": status})
    assert found is not None
    return found


def state(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "sidecar", "state": {}}, {"name": "node", "state": state}]


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}


@pytest.mark.parametrize(
    ("status", "spec", "shown", "detail"),
    [
        ({"phase": "Pending"}, {}, ShownState.QUEUED, "not scheduled yet"),
        (
            {"phase": "Pending", "conditions": [{**UNSCHEDULABLE, "message": "0/4\n nodes"}]},
            {},
            ShownState.QUEUED,
            "Unschedulable: 0/4 nodes",
        ),
        (
            {"containerStatuses": state(waiting={"reason": "ErrImagePull", "message": "denied"})},
            {"nodeName": "m1"},
            ShownState.PREPARING,
            "the image cannot be pulled: ErrImagePull: denied",
        ),
        (
            {"containerStatuses": state(waiting={"reason": "ContainerCreating"})},
            {"nodeName": "m1"},
            ShownState.PREPARING,
            "",
        ),
        (
            {"phase": "Running", "containerStatuses": state(running={"startedAt": "x"})},
            {"nodeName": "m1"},
            ShownState.RUNNING,
            "pod a-node-0-1-xyz12 on m1",
        ),
        ({"phase": "Failed"}, {"nodeName": "m1"}, ShownState.ENDED, ""),
    ],
)
def test_states(
    status: dict[str, Any], spec: dict[str, Any], shown: ShownState, detail: str
) -> None:
    found = pod(status, **spec)
    assert (found.index, found.attempt) == (1, 3)
    assert (found.state, found.detail) == (shown, detail)


def test_a_pod_that_kubernetes_ended() -> None:
    assert pod({"phase": "Failed", "reason": "Evicted", "message": "disk"}).disrupted == (
        "Evicted: disk"
    )
    assert pod({"phase": "Failed", "conditions": [DISRUPTED]}).disrupted == "PreemptionByScheduler"
    assert pod({"phase": "Failed", "reason": "Error"}).disrupted == ""


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"metadata": {"name": "../../etc"}},
        {"metadata": {"name": "a", "labels": {"x": 1}}},
        {"metadata": {"name": "a"}, "status": {"phase": "x" * 1000}},
        {"metadata": {"name": "a"}, "status": {"containerStatuses": [{"state": []}]}},
    ],
)
def test_wrong_objects_are_refused(value: Any) -> None:
    with pytest.raises(ProtocolError):
        objects.pod(value)


def test_pods_of_others_are_ignored() -> None:
    assert objects.pod({"metadata": {"name": "a"}}) is None
    labels = {objects.INDEX_LABEL: "-1"}
    assert objects.pod({"metadata": {"name": "a", "labels": labels}}) is None


@pytest.mark.parametrize(("kind", "done"), [("Completed", True), ("Complete", True), ("X", False)])
def test_jobs(kind: str, done: bool) -> None:
    conditions = [{"type": kind, "status": "True"}, {"type": "Failed", "status": "False"}]
    status = {"restarts": 2, "conditions": conditions}
    found = objects.job({"metadata": {"name": "a", "uid": "u"}, "status": status})
    assert (found.done, found.failed, found.attempt) == (done, "", 3)


def test_warnings_do_not_name_random_pods() -> None:
    events = [
        {"type": "Normal", "reason": "Created", "message": "x"},
        *(
            {
                "type": "Warning",
                "reason": "FailedCreate",
                "message": f'Error creating: pods "a-{name}" is forbidden: exceeded quota: q',
            }
            for name in ("xyz12", "abc34")
        ),
    ]
    assert objects.warnings({"items": events}) == ("FailedCreate: exceeded quota: q",)
