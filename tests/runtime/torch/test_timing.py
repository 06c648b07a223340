"""How long a rank computes in a step, although ranks also wait within the passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from dtrain.runtime.torch import timing
from runtime.torch.ranks import HERE, run

pytestmark = pytest.mark.torch


def test_the_computation_of_blocks_is_separated_from_waits(tmp_path: Path) -> None:
    run(2, HERE / "timing_job.py", tmp_path)
    fast, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for layout in ("fsdp", "pipeline"):
        assert median(slow[layout]) > median(fast[layout]) + 0.2, layout
    # Blocks of tensor ranks communicate: both look slow.
    assert all(seconds > 0 for rank in (fast, slow) for seconds in rank["tensor"])


class Event:
    """A CUDA event on a clock that the test moves. The GPU passes it at once."""

    now = 0.0
    passed = True

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return Event.passed

    def elapsed_time(self, ended: Event) -> float:
        return 1e3 * (ended.at - self.at)


class Block(nn.Linear):
    def forward(self, x: Any) -> Any:
        Event.now += 0.25
        return super().forward(x)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "passed", True)
    monkeypatch.setattr(timing, "_event", Event)
    monkeypatch.setattr(timing, "steps", timing.steps.__class__(lambda kind, **body: None))
    monkeypatch.setattr(timing.steps, "add", lambda step, compute: found.append(compute))
    yield found


def test_events_of_a_gpu_are_read_once_it_has_passed_them(found: list[Any]) -> None:
    blocks = [Block(2, 2) for _ in range(8)]
    timer = timing.StepTimer(blocks, torch.device("cuda"), local=False, blocks=blocks)
    for number in range(3):
        Event.passed = number != 1
        with timer.passes():
            for block in blocks:
                block(torch.ones(2))
                Event.now += 1.0  # waits for parameters
        for block in blocks:  # an evaluation
            block(torch.ones(2))
        timer.end_step()
        assert len(found) == (1, 1, 3)[number]
    # Of the first step, the whole time is unknown. Four of eight blocks are measured.
    assert found == [None, *[pytest.approx(8 * 0.25 * timing.PASSES)] * 2]
