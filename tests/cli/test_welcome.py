"""`dtrain` without a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.runs.events import Finished
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.record import Record
from dtrain.runs.request import Request
from support.launching import completed


def dtrain(home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "DTRAIN_HOME": str(home)}
    return completed(environment=environment)


def test_a_newcomer_sees_where_to_start(tmp_path: Path) -> None:
    done = dtrain(tmp_path)
    assert done.returncode == ExitCode.INVALID
    assert done.stdout == ""
    for command in ("dtrain init", "dtrain check", "dtrain launch", "dtrain --help"):
        assert command in done.stderr
    assert "alive" not in done.stderr


def test_an_account_without_a_home_folder() -> None:
    environment = {"PATH": "/usr/bin:/bin", "DTRAIN_HOME": "~no-such-user"}
    done = completed(environment=environment)
    assert done.returncode == ExitCode.INVALID
    assert "dtrain init" in done.stderr
    assert "bug" not in done.stderr


def test_runs_that_are_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    file = tmp_path / "cluster.yaml"
    job = {"framework": "torch", "script": "train.py"}
    file.write_text(yaml.safe_dump({"cluster": {"hosts": ["a"], "gpus": 1}, "job": job}))
    claims = []
    for number, run in enumerate(("over-1", "left-2", "led-3")):
        folder = RunFolder.create(run)
        Record(run, Request.of(file), 29500, sys.executable, 1e9 + number).save(folder.path)
        if run == "led-3":
            claims.append(folder.claim())
    report = Report(ExitCode.OK, "done")
    Journal(RunFolder.find("over-1").journal).write(1e9, Finished(report))
    shown = dtrain(tmp_path).stderr
    assert "2 runs are alive" in shown
    assert "led-3   running, started" in shown
    assert "left-2  unattended, started" in shown
    assert "dtrain attach led-3 " in shown
    assert "over-1" not in shown
