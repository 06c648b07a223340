"""`dtrain.plan` and `dtrain.check`."""

from __future__ import annotations

from typing import Any

import pytest

import dtrain
from dtrain.spec.model import Host
from dtrain.transport.select import Transports
from support.launching import Scene
from support.scripted import ScriptedHosts


def test_plan() -> None:
    answer = dtrain.plan(dtrain.PlanRequest(model_size="7B", gpus=8, gpu="h100-80gb"))
    assert answer.fits
    assert answer.best.layout.world_size == 8


def test_plan_refuses_invalid_requests() -> None:
    with pytest.raises(dtrain.UsageError, match="no model"):
        dtrain.plan(dtrain.PlanRequest(gpus=8))
    with pytest.raises(dtrain.UsageError, match="strategy"):
        dtrain.plan(dtrain.PlanRequest(model_size="7B", framework="tensorflow"))
    with pytest.raises(dtrain.UsageError, match="`sizes` has no key 'layer'"):
        dtrain.plan(dtrain.PlanRequest(sizes={"layer": 32, "hidden": 4096}))


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("backend", ["runtime"], "str"),
        ("tokens", 2e12, "str"),
        ("gpus", 8.0, "int"),
        ("gpus", True, "int"),
        ("network_gbps", "400", "float"),
        ("file", "cluster.yaml", "Path"),
        ("trials", "3", "int"),
        ("sizes", {"layers": "32", "hidden": 4096}, "int"),
        ("fixed", {"offload": "yes"}, "bool"),
        ("fixed", {"tensor": None}, "int"),
        ("fixed", ["tensor"], r"Mapping\[str, Any\]"),
        ("settings", "cluster.gpus=4", r"Sequence\[str\]"),
    ],
)
def test_plan_refuses_values_of_a_wrong_type(field: str, value: Any, kind: str) -> None:
    with pytest.raises(dtrain.UsageError, match=rf"is not of type {kind}$"):
        dtrain.plan(dtrain.PlanRequest(**{field: value}))


def test_messages_name_the_fields_of_the_request() -> None:
    with pytest.raises(dtrain.UsageError) as refused:
        dtrain.plan(dtrain.PlanRequest(model_size="100B", fixed={"data": 64}, global_batch=100))
    assert refused.value.message == "`data=64` does not divide the batch of 100 sequences"
    assert refused.value.hint == "use `data` 1, 2 or 4, or `global_batch=128`"


def test_plan_strategies() -> None:
    request = dtrain.PlanRequest(model_size="7B", framework="tensorflow")
    found = dtrain.plan(request, strategies=True)
    assert not isinstance(found, dtrain.Answer)
    assert found.strategy is not None
    assert found.question.shape.parameters == pytest.approx(7e9, rel=0.02)


def test_check(scene: Scene) -> None:
    found = dtrain.check(scene.cluster_file(scene.folder / "absent.py"))
    assert found[0].severity is dtrain.Severity.ERROR
    assert any("absent.py" in finding.seen for finding in found), found
    assert not scene.home.exists()


def test_a_check_closes_its_connections(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    open_: list[ScriptedHosts] = []

    class Connection(ScriptedHosts):
        def close(self) -> None:
            open_.remove(self)

    def connect(transports: Transports, host: Host) -> Connection:
        open_.append(Connection({host.name: b""}, host.name))
        return open_[-1]

    monkeypatch.setattr(Transports, "connect", connect)
    found = dtrain.check(scene.cluster_file(scene.script("")))
    assert "the program that dtrain started" in found[0].seen
    assert not open_


@pytest.mark.parametrize(
    ("framework", "test"), [("none", "rendezvous"), ("jax", "rendezvous"), ("jax", "bandwidth")]
)
def test_a_test_that_the_framework_does_not_have(framework: str, test: str) -> None:
    spec = {
        "cluster": {"hosts": ["a"], "gpus": 1},
        "job": {"framework": framework, "script": "train.py"},
    }
    with pytest.raises(dtrain.UsageError, match=f"`{test}` .* `job.framework` is {framework}"):
        dtrain.check(spec, **{test: True})
