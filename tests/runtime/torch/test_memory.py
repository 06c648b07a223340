"""The planner's memory, held against real training on eight processes."""

from __future__ import annotations

import json

import pytest

from runtime.torch.ranks import ROOT, run

pytestmark = pytest.mark.torch


# The script's own case, with a shorter sequence and fewer micro-batches, in half the time.
CASE = {
    "model": {
        "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 2, "ffn_hidden": 800, "vocab": 3200,
        "seq_len": 128,
    },
    "layout": {
        "tensor": 2, "pipeline": 2, "data": 2, "sharding": "optimizer", "grad_accumulation": 2,
        "recompute": "selective", "sequence_parallel": True,
    },
}  # fmt: skip


def test_the_reference_layout_needs_what_its_plan_says() -> None:
    # The script ends with 1 if a stage is more than 4 % off.
    script = ROOT / "scripts" / "planner" / "measure_memory.py"
    first, *_ = run(8, script, json.dumps(CASE))
    assert first.count("MiB, planned") == 2, first
