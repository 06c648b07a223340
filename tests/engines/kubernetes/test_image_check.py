"""The pod that looks into the image: what it takes from the job, and what keeps it from running."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtrain.checks import Severity
from dtrain.diagnostics import ConnectError
from dtrain.engines.kubernetes import image_check, training_runtime
from dtrain.engines.kubernetes.client import ForbiddenError
from dtrain.engines.kubernetes.training_runtime import TrainingRuntime
from dtrain.launchplan.build import build
from dtrain.messages.decode import ProtocolError
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
ON_ITS_WAY = {"phase": "Pending"}
LATE = {"phase": "Failed", "reason": "DeadlineExceeded"}


class Server:
    """Lets the user create a pod, which stays in one state."""

    namespace, host, context = "ml", "10.0.0.1", "prod"

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
        spec = {"nodeName": "" if self._status is UNSCHEDULABLE else "m"}
        return {"metadata": {"name": "dtrain-check-1"}, "spec": spec, "status": self._status}


def findings(server: Server) -> list[tuple[Severity, str]]:
    check = image_check.ImageCheck(PLAN, server, place=str)  # type: ignore[arg-type]
    return [(finding.severity, finding.seen) for finding in check.findings()]


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (UNSCHEDULABLE, "Unschedulable"),
        (ON_ITS_WAY, "its pod did not start within 0 s"),
        (LATE, "DeadlineExceeded"),
        ({"phase": "Failed"}, "its pod ended in the phase Failed"),
    ],
)
def test_a_pod_that_does_not_run_is_a_warning(
    status: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("QUEUED_SECONDS", "START_SECONDS"):
        monkeypatch.setattr(image_check, limit, 0.0)
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


RUNTIME = {
    "spec": {
        "template": {
            "spec": {
                "replicatedJobs": [
                    {"name": "initializer", "template": None},
                    {
                        "name": "node",
                        "template": {
                            "spec": {
                                "template": {
                                    "spec": {
                                        "nodeSelector": {"zone": "b", "gpu": "h100"},
                                        "tolerations": [{"key": "gpu", "operator": "Exists"}],
                                        "imagePullSecrets": [{"name": "shared"}],
                                        "runtimeClassName": "nvidia",
                                        "priorityClassName": "high",
                                        "initContainers": [{"name": "fetch"}],
                                        "volumes": [{"name": "hub"}],
                                        "containers": [
                                            {"name": "sidecar", "env": [{"name": "A"}]},
                                            {
                                                "name": "node",
                                                "image": "other:1",
                                                "env": [
                                                    {"name": "HF_HOME", "value": "/hub"},
                                                    {"name": "TOKEN", "valueFrom": {"x": {}}},
                                                ],
                                                "volumeMounts": [{"mountPath": "/hub"}],
                                            },
                                        ],
                                    }
                                }
                            }
                        },
                    },
                ]
            }
        }
    }
}


def test_the_pod_of_a_train_job_has_what_its_runtime_adds() -> None:
    runtime = training_runtime.parsed(RUNTIME, "torch-distributed")
    assert runtime.folders == ("/hub",)
    assert runtime.unseen == (
        "what the runtime torch-distributed adds (volumes, init containers, variables from other"
        " objects)"
    )
    spec = image_check.check_pod(PLAN, "dtrain-check-1", runtime)["spec"]
    (container,) = spec["containers"]
    assert container["image"] == "train:1"
    assert container["env"] == [{"name": "HF_HOME", "value": "/hub"}]
    assert spec["nodeSelector"] == {"zone": "a", "gpu": "h100"}
    assert spec["imagePullSecrets"] == [{"name": "shared"}, {"name": "registry"}]
    assert spec["runtimeClassName"] == "nvidia"
    assert [one["key"] for one in spec["tolerations"]] == ["gpu", "nvidia.com/gpu"]
    assert spec["securityContext"]["runAsUser"] == 1000
    assert not {"priorityClassName", "initContainers", "volumes"} & spec.keys()


@pytest.mark.parametrize("spec", [{"nodeSelector": 3}, {"containers": {}}, {"tolerations": ["x"]}])
def test_a_hostile_runtime_is_refused(spec: dict[str, Any]) -> None:
    job = {"name": "node", "template": {"spec": {"template": {"spec": spec}}}}
    with pytest.raises(ProtocolError):
        training_runtime.parsed({"spec": {"template": {"spec": {"replicatedJobs": [job]}}}}, "r")


def test_a_runtime_that_is_not_readable_is_not_known() -> None:
    class Refuses:
        def request(self, method: str, path: str) -> dict[str, Any]:
            raise ForbiddenError("10.0.0.1", f"{method} {path}", "forbidden")

    keys = replace(PLAN.kubernetes, api="trainjob", runtime="r")  # type: ignore[type-var]
    found = training_runtime.read(Refuses(), keys)  # type: ignore[arg-type]
    assert found == TrainingRuntime(unseen="the runtime r, which you may not read,")
    assert training_runtime.read(Refuses(), PLAN.kubernetes) is None  # type: ignore[arg-type]
