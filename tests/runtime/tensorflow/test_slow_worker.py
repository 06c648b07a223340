"""A slow worker of a mirrored strategy is named, although the workers wait inside the graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dtrain.failures.stragglers import Straggler, StragglerDetector
from dtrain.runs.progress import StepReport
from runtime.tensorflow.conftest import CHECKS, Start

pytestmark = pytest.mark.tensorflow


def found(folder: Path) -> Straggler | None:
    """The slow workers by what the workers have written."""
    detector = StragglerDetector(2)
    for file in sorted(folder.glob("*.progress")):
        for body in map(json.loads, file.read_text().splitlines()):
            if body["event"] == "steps":
                for block in StepReport.read(file.stem, body).blocks:
                    assert block.compute is not None
                    detector.add(file.stem, file.stem, 0, block)
    return detector.find()


@pytest.mark.parametrize("loop", ["fit", "custom"])
def test_a_slow_worker_is_named_within_100_steps(loop: str, start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "progress"
    folder.mkdir()
    command = [CHECKS / "slow_worker.py", loop, 80, 0.03, 3.0]
    environment = {"DTRAIN_RUN_DIR": str(folder)}
    for task in start("multi_worker_mirrored", command, environment, worker=2).values():
        task.succeeds()
    straggler = found(folder)
    assert straggler is not None
    assert straggler.processes == ("worker-1",)
    # Its pause is three times as long. With the waits, both would look alike.
    assert straggler.slower > 0.3
