"""The end of what a Slurm job reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.engines.slurm.job import SlurmJob
from dtrain.failures.cause import Report
from dtrain.messages.slurm import WorkerReport
from dtrain.runs import journal
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import RunFolder
from dtrain.runs.record import Record, Request
from dtrain.session.observer import NullObserver

FILE = """
cluster: {nodes: 1, gpus: 1, slurm: {partition: p}}
job: {framework: torch, script: train.py}
"""


def test_the_last_phases_of_a_job_are_journaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path))
    folder = RunFolder.create("run-1")
    record = Record("run-1", Request("c.yaml", "/", FILE), 29500, "python3", 1e9)
    job = SlurmJob(record, folder, observer=NullObserver(), on_running=lambda run: None, secrets={})
    for done in (1, 2, 3):
        said = {
            "event": "steps", "done": done, "waits": None, "group": 1, "blocks": [],
            "time": 1e9 + done, "phases": {"data": 0.25 * done},
        }  # fmt: skip
        job.watch.worker_said(WorkerReport("n1", "rank-0.progress", said))
    job.finish(Report(ExitCode.OK, "done"))
    events = [event for _, event in JournalReader(folder.journal).read()]
    phases = [event.seconds for event in events if isinstance(event, journal.PhasesSpent)]
    assert phases == [{"data": 0.25}, {"data": 0.75}]
    assert isinstance(events[-1], journal.Finished)
