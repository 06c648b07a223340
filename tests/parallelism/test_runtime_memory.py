"""Planned memory of the training runtime, compared with PyTorch's memory tracker."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.hardware import GIB
from dtrain.parallelism.cost.memory import stage_memory
from dtrain.parallelism.model.shape import Shape
from dtrain.runtime.layout import Layout
from support.oracles import ask
from support.warm import TORCH

ROOT = Path(__file__).resolve().parents[2]
RECORD = json.loads(Path(__file__).with_name("memory_cases.json").read_text())
SMALL = {
    "model": {
        "layers": 2, "hidden": 512, "heads": 8, "kv_heads": 4, "ffn_hidden": 1536,
        "vocab": 40960, "seq_len": 256,
    },
    "layout": {"data": 4, "sharding": "full", "micro_batch": 2, "recompute": "selective"},
}  # fmt: skip


def planned(case: dict[str, Any]) -> float:
    """Bytes that the planner counts for the allocator, on the case's stage."""
    model, layout = case["model"], Layout(**case["layout"])
    shape = Shape(head_size=model["hidden"] // model["heads"], **model)
    return stage_memory(shape, layout, Assumptions(), case.get("stage", 0)).allocated * GIB


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: case["name"])
def test_recorded_cases(case: dict[str, Any]) -> None:
    assert 0.96 * case["peak"] <= planned(case) <= 1.04 * case["peak"]


def test_some_cases_were_not_used_for_the_formulas() -> None:
    assert sum(case.get("held_out", False) for case in RECORD["cases"]) >= 7


@pytest.mark.torch
def test_a_case_without_a_record() -> None:
    tracker = ROOT / "scripts" / "planner" / "track_memory.py"
    answer = ask(TORCH, tracker, json.dumps(SMALL))
    assert planned(SMALL) == pytest.approx(answer["peak"], rel=0.04)


@pytest.mark.torch
def test_the_record_is_from_this_torch() -> None:
    assert RECORD["torch"] == version("torch").split("+")[0], (
        "record again: scripts/planner/track_memory.py --record"
    )
