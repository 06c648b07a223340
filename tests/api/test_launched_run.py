"""The handle of a run in the background, without a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import dtrain
from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.loading import load
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.record import Record
from dtrain.session.reporting import follow

SPEC = {
    "cluster": {"hosts": ["a"], "gpus": 0, "slots": 1, "transport": "local"},
    "job": {"framework": "none", "command": ["true"]},
}


@pytest.mark.parametrize("act", [dtrain.LaunchedRun.wait, dtrain.LaunchedRun.stop])
def test_a_run_that_ends_at_this_moment_gives_its_report(
    act: Callable[[dtrain.LaunchedRun], Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("job-1")
    Record("job-1", load(SPEC), 29500, "python3", 1e9).save(folder.path)
    report = Report(ExitCode.OK, "the worker finished")
    ending = follow.ending

    def ends_after_the_first_look(folder: RunFolder) -> Report | None:
        found = ending(folder)
        if found is None:
            Journal(folder.journal).write(1e9, events.Finished(report))
        return found

    monkeypatch.setattr(follow, "ending", ends_after_the_first_look)
    assert act(dtrain.LaunchedRun("job-1")) == report


def test_modules_in_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    spec = {**SPEC, "cluster": {**SPEC["cluster"], "run_dir": str(tmp_path / "nodes")}}
    assert dtrain.launch(spec, detach=True).wait().ok
