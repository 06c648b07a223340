"""The planner's memory, held against real training on eight processes."""

from __future__ import annotations

import pytest

from runtime.torch.ranks import ROOT, run

pytestmark = pytest.mark.torch


def test_the_reference_layout_needs_what_its_plan_says() -> None:
    # The script ends with 1 if a stage is more than 4 % off.
    first, *_ = run(8, ROOT / "scripts" / "planner" / "measure_memory.py")
    assert first.count("MiB, planned") == 2, first
