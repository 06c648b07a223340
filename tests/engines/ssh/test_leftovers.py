"""What a finished run may have left on its hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

import dtrain
from dtrain.diagnostics import ExitCode
from dtrain.engines.ssh.controller import with_uncleaned
from dtrain.failures.cause import Report
from dtrain.runs import events, journal
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.request import Request

FILE = """
cluster: {{hosts: [a, b], transport: local, slots: 1, run_dir: {folder}/nodes}}
job: {{framework: none, script: train.py, restart: {{max: 1}}, on_disconnect: {then}}}
"""


@pytest.mark.parametrize(
    ("then", "hints"),
    [
        ("keep", ["`dtrain stop run-1` ends leftover processes, if it can reach the host"]),
        (
            "stop",
            [
                "`dtrain stop run-1` ends leftover processes, if it can reach the host",
                "a host that is cut off stops its workers after 300 s (job.lease)",
            ],
        ),
    ],
)
def test_a_report_forgets_what_stop_has_ended(
    then: str, hints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(tmp_path / "home"))
    folder = RunFolder.create("run-1")
    request = Request("c.yaml", str(tmp_path), FILE.format(folder=tmp_path, then=then))
    record = Record(
        "run-1", request, 29500, "python3", 1.0, attempt=2, leftovers=(("a", 1), ("b", 1))
    )
    record.save(folder.path)
    failed = Report(ExitCode.JOB_FAILED, "rank 0 failed", problems=("b: slow",), hint="look")
    report = with_uncleaned(failed, record)
    assert report.problems == ("b: slow", "a,b: an earlier attempt may still run")
    assert report.hint.splitlines() == ["look", *hints]
    written = (events.RunStarted(("a", "b")), events.Finished(report))
    folder.journal.write_bytes(b"".join(journal.encode(1.0, event) for event in written))
    assert dtrain.stop("run-1") is ExitCode.OK
    now = dtrain.LaunchedRun("run-1").status().report
    assert now is not None
    assert (now.problems, now.hint) == (("b: slow",), "look")
    assert not Record.load(folder.path).leftovers
