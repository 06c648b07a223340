"""What the journal of a run that another system controls says about its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.engines.followed_run import FollowedRun
from dtrain.failures.cause import Report
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.record import Record, Request
from dtrain.session.caller import Caller

FILE = """
cluster: {nodes: 1, gpus: 1, slurm: {partition: p}}
job: {framework: torch, script: train.py}
"""
FAILED = Report(ExitCode.JOB_FAILED, "rank 0 failed")


@pytest.mark.parametrize("end", ["next attempt", "leave", "finish"])
def test_the_last_output_is_journaled_with_the_time_at_which_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    record = Record("run-1", Request("c.yaml", "/", FILE), 29500, "python3", 1e9)
    run = FollowedRun(record, folder, Caller(), {})
    stream = folder.stream("n1", "rank-0.out", ranked=True)
    run.grown(stream, 10)
    run.grown(stream, 20)  # soon after: not journaled yet
    match end:
        case "next attempt":
            run.next_attempt(FAILED, "the job starts again")
        case "leave":
            run.leave(FAILED)
        case "finish":
            run.finish(FAILED)
    found = [event for _, event in JournalReader(folder.journal).read()]
    name = str(stream.path.relative_to(folder.path))
    assert found[:2] == [events.Sizes({name: 10}), events.Sizes({name: 20})]
