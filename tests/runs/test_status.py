"""The status of runs, and which run a command means."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode, UsageError
from dtrain.failures.cause import Report
from dtrain.failures.stalls import Stall
from dtrain.runs.events import AttemptFailed, HostState, NextAttempt, Progressed, StallChanged
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record, run_name
from dtrain.runs.request import Request
from dtrain.runs.restart import AttemptResult
from dtrain.runs.status import find_run, status
from support.stored import END

FILE = "{cluster: {hosts: [n1], gpus: 0, transport: local}, job: {framework: none, script: a.py}}"


def run(name: str, *, over: bool) -> str:
    folder = RunFolder.create(name)
    Record(name, Request("cluster.yaml", "/", FILE), 29500, "python3", 1e9).save(folder.path)
    written = Journal(folder.journal)
    written.write(1e9, HostState("n1", "running", ""))
    if over:
        written.write(2e9, END)
    return name


def test_of_several_runs_the_one_that_is_not_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    old, alive = run("train-1", over=True), run("train-2", over=False)
    assert find_run("train").name == find_run(alive).name == alive
    assert find_run(old).name == old
    run("train-3", over=False)
    with pytest.raises(UsageError, match="'train' means 2 runs that are not over"):
        find_run("train")
    with pytest.raises(UsageError, match="no run"):
        find_run("")


def test_a_run_of_another_job_with_a_longer_name_is_not_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    run("train-20261125-100000-00000a", over=True)
    latest = run("train-20261125-110000-00000b", over=True)
    big = run("train-big-20261125-120000-00000c", over=False)
    assert find_run("train").name == latest
    assert find_run("train-big").name == find_run("train-b").name == big
    alive = run("train-20261125-090000-00000d", over=False)
    assert find_run("train").name == alive


@pytest.mark.parametrize("job", ["a" * 64, "v2.", "a_b-"])
def test_a_run_is_found_by_the_whole_name_of_its_job(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    older, latest = (run(run_name(job, begun), over=True) for begun in (1e9, 1e9 + 60))
    assert find_run(job).name == latest != older


def test_the_latest_run_when_summer_time_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    begun = datetime(2026, 10, 25, 0, 50, tzinfo=timezone.utc).timestamp()
    with monkeypatch.context() as berlin:
        berlin.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        run(run_name("train", begun), over=True)  # at 02:50
        latest = run(run_name("train", begun + 1200), over=True)  # at 02:10
    time.tzset()
    assert find_run("train").name == latest


def test_the_status_is_that_of_the_latest_attempt_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.find(run("train-1", over=False))
    written, found = Journal(folder.journal), time.time() // 1 - 100
    written.write(found, Progressed(Progress("rank-0", 1.0, 8, 100, None, None, {})))
    written.write(found, StallChanged(Stall(("rank-0",), ("n1",), 20.0, 8, 1)))
    stall = status(folder).stall
    assert stall is not None
    assert stall.seconds == 20
    claim = folder.claim()
    assert claim is not None
    stall = status(folder).stall
    claim.close()
    assert stall is not None
    assert stall.seconds >= 120
    assert (status(folder).attempt, status(folder).failure) == (1, "")
    report = Report(ExitCode.JOB_FAILED, "rank 0 on n1 exited with status 1")
    written.write(found + 49, AttemptFailed(1, AttemptResult(True, 8, "n1"), report))
    assert (status(folder).attempt, status(folder).failure) == (1, "")
    written.write(found + 50, NextAttempt(2, ("n1",)))
    after = status(folder)
    assert (after.attempt, after.failure) == (2, report.reason)
    assert (after.progress, after.stall) == (None, None)
    assert after.hosts["n1"].since == found + 50
