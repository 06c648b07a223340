"""What dtrain reads of Kubernetes objects, which may be wrong or hostile."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.engines.kubernetes import objects
from dtrain.messages.decode import ProtocolError, decode
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


def test_a_pod_that_terminates_has_a_log_once_its_container_runs() -> None:
    def terminating(**container: Any) -> objects.Pod:
        metadata = {"name": "a", "labels": LABELS, "deletionTimestamp": "2026-11-22T10:00:00Z"}
        status = {"phase": "Running", "containerStatuses": state(**container)}
        found = objects.pod({"metadata": metadata, "status": status})
        assert found is not None
        assert found.state is ShownState.STOPPING
        return found

    assert terminating(running={"startedAt": "x"}).started
    assert not terminating(waiting={"reason": "ContainerCreating"}).started


def test_a_pod_is_deleted_when_somebody_asks_for_it() -> None:
    """The server writes when the pod must be gone."""
    deletion = {"deletionTimestamp": "1970-01-01T00:00:45Z", "deletionGracePeriodSeconds": 30}
    found = objects.pod({"metadata": {"name": "a", "labels": LABELS, **deletion}})
    assert found is not None
    assert found.deleted == 15.0


def test_a_container_that_was_started_again_has_ended() -> None:
    last = {"terminated": {"exitCode": 7, "reason": "Error"}}
    container = {"name": "node", "lastState": last, "restartCount": 1}
    for now in ({"running": {}}, {"waiting": {"reason": "CrashLoopBackOff"}}):
        status = {"phase": "Running", "containerStatuses": [{**container, "state": now}]}
        found = pod(status, nodeName="m1")
        assert found.again
        assert found.over
        assert found.started
        assert found.state is ShownState.ENDED
        assert found.ended == objects.Terminated(7, "Error")
    assert not pod({"containerStatuses": state(running={})}).again


def test_null_fields_are_missing_fields() -> None:
    metadata = {"name": "a", "labels": LABELS, "deletionTimestamp": None}
    status = {"phase": "Pending", "conditions": None, "containerStatuses": None}
    found = objects.pod({"metadata": metadata, "spec": None, "status": status})
    assert found is not None
    assert found.detail == "not scheduled yet"
    assert objects.object_list({"items": None, "metadata": {}}).items == ()
    assert not objects.job({"metadata": {"name": "a"}, "status": {"conditions": None}}).over


def test_a_version_that_is_no_number_is_not_sent_back() -> None:
    event = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "12\n3"}}}
    assert decode(objects.WatchEvent, event, "event").version == ""
    event["object"] = {"metadata": {"resourceVersion": "12"}}
    assert decode(objects.WatchEvent, event, "event").version == "12"


def test_a_pod_that_kubernetes_ended() -> None:
    assert pod({"phase": "Failed", "reason": "Evicted", "message": "disk"}).disrupted == (
        "Evicted: disk"
    )
    assert pod({"phase": "Failed", "conditions": [DISRUPTED]}).disrupted == "PreemptionByScheduler"
    refused = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no device"}
    assert pod(refused).disrupted == "UnexpectedAdmissionError: no device"
    ended = state(terminated={"exitCode": 1})
    assert pod({"phase": "Failed", "reason": "E", "containerStatuses": ended}).disrupted == ""


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"metadata": {"name": "../../etc"}},
        {"metadata": {"name": "a", "labels": {"x": 1}}},
        {"metadata": {"name": "a"}, "status": {"phase": "x" * 2000}},
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
    for of_pod in (True, False):
        found = objects.warnings({"items": events}, of_pod=of_pod)
        assert found == ("FailedCreate: exceeded quota: q",)


@pytest.mark.parametrize(
    ("reason", "of_pod", "of_job"),
    [
        ("FailedMount", True, False),
        ("FailedScheduling", False, False),
        ("JobCreationFailed", True, True),
        ("RestartJobSetFailurePolicyAction", True, False),
    ],
)
def test_which_warnings_explain_what(reason: str, of_pod: bool, of_job: bool) -> None:
    events = {"items": [{"type": "Warning", "reason": reason, "message": "x"}]}
    assert bool(objects.warnings(events, of_pod=True)) == of_pod
    assert bool(objects.warnings(events, of_pod=False)) == of_job
