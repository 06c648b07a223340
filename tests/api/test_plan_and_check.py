"""`dtrain.plan` and `dtrain.check`."""

from __future__ import annotations

import pytest

import dtrain
from support.launching import Scene


def test_plan() -> None:
    answer = dtrain.plan(dtrain.PlanRequest(model_size="7B", gpus=8, gpu="h100-80gb"))
    assert answer.fits
    assert answer.best.layout.world_size == 8


def test_plan_refuses_invalid_requests() -> None:
    with pytest.raises(dtrain.UsageError, match="no model"):
        dtrain.plan(dtrain.PlanRequest(gpus=8))
    with pytest.raises(dtrain.UsageError, match="strategy"):
        dtrain.plan(dtrain.PlanRequest(model_size="7B", framework="tensorflow"))


def test_check(scene: Scene) -> None:
    found = dtrain.check(scene.cluster_file(scene.folder / "absent.py"))
    assert found[0].severity is dtrain.Severity.ERROR
    assert any("absent.py" in finding.seen for finding in found), found
    assert not scene.home.exists()
