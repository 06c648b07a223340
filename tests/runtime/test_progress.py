"""A script's progress reports, as lines in the run's folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from dtrain.runtime.progress import process_name

SAY = """
import sys
from dtrain.runtime import progress
for step in range(1, int(sys.argv[1]) + 1):
    progress(step, total=int(sys.argv[1]), loss=1 / step, tokens=10, accuracy=step)
"""


def say(code: str, folder: Path | None, *args: str, **environment: str) -> list[dict[str, object]]:
    """Run ``code`` as a worker of a run in ``folder``. Returns its reports."""
    given = {} if folder is None else {"DTRAIN_RUN_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path), **given, **environment},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    files = [] if folder is None else [p for p in folder.glob("*.progress") if p.is_file()]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if line["event"] != "steps"]


def test_every_token_is_counted_though_few_steps_are_reported(tmp_path: Path) -> None:
    events = say(SAY, tmp_path, "1000", RANK="3")
    assert [path.name for path in tmp_path.iterdir()] == ["rank-3.progress"]
    assert (tmp_path / "rank-3.progress").stat().st_mode & 0o777 == 0o600
    assert events[0]["step"] == 1
    assert 2 <= len(events) < 100
    last = events[-1]
    assert (last["event"], last["step"], last["total"]) == ("progress", 1000, 1000)
    assert (last["loss"], last["tokens"], last["metrics"]) == (0.001, 10_000, {"accuracy": 1000.0})


def test_without_dtrain_it_does_nothing(tmp_path: Path) -> None:
    assert say(SAY, None, "5") == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path: Path) -> None:
    assert say(SAY, tmp_path / "gone", "5") == []
    (tmp_path / "worker-0.progress").symlink_to("/dev/full")
    assert say(SAY, tmp_path, "5") == []


def test_a_loss_is_read_only_when_it_is_reported(tmp_path: Path) -> None:
    code = """
from dtrain.runtime import progress
class Loss:
    reads = 0
    def __float__(self):
        Loss.reads += 1
        return float("nan")
for step in range(1, 1001):
    progress(step, loss=Loss())
assert 1 <= Loss.reads < 100, Loss.reads
"""
    assert all(math.isnan(event["loss"]) for event in say(code, tmp_path))  # type: ignore[arg-type]


def test_a_loss_with_a_gradient_is_detached_first(tmp_path: Path) -> None:
    """Otherwise torch warns."""
    code = """
from dtrain.runtime import progress
class Loss:
    def detach(self):
        return 0.5
    def __float__(self):
        raise AssertionError
progress(1, loss=Loss(), accuracy=Loss())
"""
    (event,) = say(code, tmp_path)
    assert (event["loss"], event["metrics"]) == (0.5, {"accuracy": 0.5})


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"RANK": "12", "TF_CONFIG": "{}"}, "rank-12"),
        ({"TF_CONFIG": '{"task": {"type": "chief", "index": 0}}'}, "chief-0"),
        ({"TF_CONFIG": '{"cluster": {}}'}, "worker-0"),
        ({"TF_CONFIG": "nonsense"}, "worker-0"),
        ({}, "worker-0"),
    ],
)
def test_a_process_is_named_as_the_launch_names_it(
    environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "TF_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert process_name() == name
