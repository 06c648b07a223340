"""The program of a trial, on real processes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from dtrain.messages.trial import TrialLine, trial_line
from dtrain.runtime.layout import Layout
from runtime.torch.ranks import ROOT, run

pytestmark = pytest.mark.torch
PROGRAM = ROOT / "launcher" / "dtrain" / "runtime" / "torch" / "trial.py"
SIZES = {
    "hidden": 32, "heads": 4, "kv_heads": 2, "head_size": 8, "ffn_hidden": 64, "vocab": 96,
}  # fmt: skip


def measured(layout: Layout, cases: list[list[int]], **sizes: Any) -> list[TrialLine]:
    order = {"model": {**SIZES, **sizes}, "cases": cases, "seconds": 0.01}
    training = {"global_batch": layout.global_batch, "seq_len": 32, "precision": "fp32"}
    said = run(
        layout.world_size,
        PROGRAM,
        json.dumps(order),
        DTRAIN_STRATEGY="3d",
        DTRAIN_LAYOUT=json.dumps(asdict(layout)),
        DTRAIN_TRAINING=json.dumps(training),
    )
    found = [trial_line(line) for line in said[0].splitlines()]
    return [line for line in found if line is not None]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(data=2, grad_accumulation=2), {"tied": True}),
        (Layout(tensor=2, sequence_parallel=True, grad_accumulation=2), {"head_size": 12}),
        (Layout(pipeline=2, grad_accumulation=2), {"gated": False, "kv_heads": 4}),
        (Layout(context=2, sharding="full", recompute="full"), {}),
        (Layout(data=2, expert=2, sharding="full"), {"experts": 4, "experts_per_token": 2}),
    ],
    ids=["ddp", "tensor", "pipeline", "context", "experts"],
)
def test_each_case_is_measured(layout: Layout, sizes: dict[str, Any]) -> None:
    cases = [[2, 2], [4, 2], [2, 4], [4, 4]] if layout.pipeline > 1 else [[1, 1], [2, 2]]
    found = measured(layout, cases, **sizes)
    assert [[one.layers, one.micro_batches] for one in found] == cases
    assert all(0 < one.fastest <= one.seconds < 60 and one.allocated is None for one in found)
    assert all(one.resident for one in found)
