"""The pod that looks into the image: what it takes from the job, and what keeps it from running."""

from __future__ import annotations

from typing import Any

import pytest

from dtrain.checks import Severity
from dtrain.diagnostics import ConnectError
from dtrain.engines.kubernetes import image_check
from dtrain.launchplan.plan import build
from dtrain.spec.load import parse

FILE = """
cluster:
  kubernetes:
    image: train:1
    run_as_user: 1000
    resources: {cpu: 64, rdma/hca: 1}
    claims: ["data:/data"]
    node_selector: {zone: a}
    pull_secrets: [registry]
    service_account: trainer
  nodes: 2
  gpus: 2
job: {framework: torch, script: t.py, env: {PRICE: "$(HOME) $$5"}, secrets: [TOKEN]}
"""
PLAN = build(parse(FILE, "job.yaml"))
UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
}
LATE = {"phase": "Failed", "reason": "DeadlineExceeded"}


class Server:
    """Lets the user create a pod, which stays in one state."""

    namespace, host = "ml", "10.0.0.1"

    def __init__(self, status: dict[str, Any], *, deletes: bool = True) -> None:
        self._status = status
        self._deletes = deletes
        self.deleted: list[str] = []

    def request(self, method: str, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        if method == "DELETE":
            self.deleted.append(path)
            if not self._deletes:
                raise ConnectError(self.host, "DELETE", "connection refused")
        if path.endswith("selfsubjectaccessreviews"):
            return {"status": {"allowed": True}}
        return {"metadata": {"name": "dtrain-check-1"}, "status": self._status}


def findings(server: Server) -> list[tuple[Severity, str]]:
    check = image_check.ImageCheck(PLAN, server, place=str)  # type: ignore[arg-type]
    return [(finding.severity, finding.seen) for finding in check.findings()]


@pytest.mark.parametrize(
    ("status", "why"),
    [(UNSCHEDULABLE, "Unschedulable"), (LATE, "its pod ended in the phase Failed")],
)
def test_a_pod_that_does_not_run_is_a_warning(
    status: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_check, "QUEUED_SECONDS", 0.0)
    server = Server(status)
    warned = (Severity.WARNING, f"dtrain did not look into the image: {why}")
    assert findings(server) == [warned]
    assert len(server.deleted) == 1


def test_a_pod_that_cannot_be_deleted_is_named() -> None:
    _, left = findings(Server(LATE, deletes=False))
    assert left[1].startswith("the pod dtrain-check-")
    assert left[1].endswith(" may still be there: connection refused")


def test_the_pod_needs_less_than_the_job() -> None:
    pod = image_check.check_pod(PLAN, "dtrain-check-1")
    (container,) = pod["spec"].pop("containers")
    assert container["image"] == "train:1"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"] == {"cpu": "500m", "memory": "512Mi"}
    assert "env" not in container
    assert "export PRICE='$$(HOME) $$$$5'" in container["command"][-1]
    assert {"nodeSelector", "imagePullSecrets", "serviceAccountName"} < pod["spec"].keys()
    assert pod["spec"]["securityContext"]["runAsUser"] == 1000
    assert "volumes" not in pod["spec"]
