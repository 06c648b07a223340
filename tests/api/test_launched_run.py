"""The handle of a run in the background, without a job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

import dtrain
from dtrain import api
from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import LEFT, Report
from dtrain.loading import load
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.record import Record
from dtrain.session.reporting import follow
from dtrain.session.stopping import control as control_module
from dtrain.session.stopping.control import Control
from support.limits import HANG

SPEC = {
    "cluster": {"hosts": ["a"], "gpus": 0, "slots": 1, "transport": "local"},
    "job": {"framework": "none", "command": ["true"]},
}


REPORT = Report(ExitCode.OK, "the worker finished")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder of a run that has not ended."""
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("job-1")
    Record("job-1", load(SPEC), 29500, "python3", 1e9).save(folder.path)
    return folder


def end(folder: RunFolder) -> None:
    Journal(folder.journal).write(1e9, events.Finished(REPORT))


@pytest.mark.parametrize("act", [dtrain.LaunchedRun.wait, dtrain.LaunchedRun.stop])
def test_a_run_that_ends_at_this_moment_gives_its_report(
    act: Callable[[dtrain.LaunchedRun], Report], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = follow.ending

    def ends_after_the_first_look(folder: RunFolder) -> Report | None:
        found = ending(folder)
        if found is None:
            end(folder)
        return found

    monkeypatch.setattr(follow, "ending", ends_after_the_first_look)
    assert act(dtrain.LaunchedRun("job-1")) == REPORT


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_ends_at_the_time_limit_gives_its_report(
    ends: bool, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()

    class Leaves(Control):
        def leave(self) -> None:
            super().leave()
            left.set()

    def attach(run: str, control: Control) -> Report:
        assert left.wait(HANG)
        if ends:
            end(folder)
        return LEFT

    monkeypatch.setattr(control_module, "Control", Leaves)
    monkeypatch.setattr(api, "attach", attach)
    with nullcontext() if ends else pytest.raises(TimeoutError):
        assert dtrain.LaunchedRun("job-1").wait(0) == REPORT


def test_modules_in_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    spec = {**SPEC, "cluster": {**SPEC["cluster"], "run_dir": str(tmp_path / "nodes")}}
    assert dtrain.launch(spec, detach=True).wait().ok
