"""The reports of workers: which ones are journaled, shown and noticed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dtrain.launchplan.build import build
from dtrain.runs import events, progress
from dtrain.runs.events import JournalEvent, RunEvent
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.progress import StepReport
from dtrain.runtime import steps
from dtrain.session.reporting.observer import Observer
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.reports import LEAST_SECONDS, MOST_SECONDS, ProgressReports
from dtrain.spec.load import parse

PLAN = build(
    parse(
        "cluster: {hosts: [gpu01, gpu02], gpus: 2}\njob: {framework: none, script: train.py}\n",
        "cluster.yaml",
    )
)
STEPS = {"event": "steps", "done": 3, "waits": None, "group": 1, "blocks": [], "time": 1.0}


class Notices(Observer):
    def __init__(self) -> None:
        self.shown: list[str] = []

    def on_event(self, event: RunEvent) -> None:
        if isinstance(event, events.NoticeShown):
            self.shown.append(event.text)


def made(step: int) -> dict[str, Any]:
    return {"event": "progress", "time": 1.0, "step": step, "total": 9, "loss": None,
            "tokens": None, "metrics": {}}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def reports_to(recorder: Recorder) -> ProgressReports:
    return ProgressReports(PLAN, recorder)


def test_a_report_during_the_end_is_journaled_once(folder: RunFolder) -> None:
    """The connection's thread adds it while another one closes the reports."""

    class Interrupted(Recorder):
        def record(self, event: JournalEvent) -> None:
            if isinstance(event, events.Progressed) and event.report.step == 2:
                reports.add("gpu01", "rank-0.progress", {**STEPS, "phases": {"save": 2.0}})
            super().record(event)

    reports = reports_to(Interrupted(folder, Observer()))
    for report in (
        made(1),
        {**STEPS, "phases": {"data": 1.0}},
        # Not journaled yet: too soon after the first ones.
        made(2),
        {**STEPS, "phases": {"data": 2.0}},
    ):
        reports.add("gpu01", "rank-0.progress", report)
    reports.close()
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    spent = [dict(one.seconds) for one in journaled if isinstance(one, events.PhasesSpent)]
    done = [one.report.step for one in journaled if isinstance(one, events.Progressed)]
    assert (done, spent) == ([1, 2], [{"data": 1.0}, {"save": 2.0}])


def test_no_report_of_another_process_follows_one_of_the_representative(folder: RunFolder) -> None:
    """The threads of two hosts add them at the same moment."""

    class Slow(Recorder):
        def record(self, event: JournalEvent) -> None:
            if isinstance(event, events.Progressed) and event.report.process == "rank-2":
                first.start()
                first.join(0.2)  # without a lock, it ends
            super().record(event)

    reports = reports_to(Slow(folder, Observer()))
    first = threading.Thread(target=reports.add, args=("gpu01", "rank-0.progress", made(9)))
    reports.add("gpu02", "rank-2.progress", made(1))
    first.join()
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    named = [one.report.process for one in journaled if isinstance(one, events.Progressed)]
    assert named == ["rank-2", "rank-0"]


def test_the_last_step_is_journaled_if_its_phases_were_reported_before(folder: RunFolder) -> None:
    """As after a report between the wait for data of a step and the end of that step."""
    reports = reports_to(Recorder(folder, Observer()))
    for done in (39, 40):
        reports.add("gpu01", "rank-0.progress", {**STEPS, "done": done, "phases": {"data": 1.0}})
    reports.close()
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    assert [one.step for one in journaled if isinstance(one, events.PhasesSpent)] == [39, 40]


def test_the_first_step_is_journaled_at_once(folder: RunFolder) -> None:
    """Also if the script counts from 0, and so has reported before it."""
    reports = reports_to(Recorder(folder, Observer()))
    for step in (0, 1, 2):
        reports.add("gpu01", "rank-0.progress", made(step))
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    assert [one.report.step for one in journaled if isinstance(one, events.Progressed)] == [0, 1]


def test_the_first_step_of_rank_0_is_journaled_at_once_after_that_of_another_rank(
    folder: RunFolder,
) -> None:
    """The time of a step comes from two reports of one rank, also in a run of some seconds."""
    reports = reports_to(Recorder(folder, Observer()))
    for rank, step in ((3, 1), (0, 1), (3, 2), (0, 2), (0, 9)):
        reports.add("gpu01", f"rank-{rank}.progress", made(step))
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    found = [one.report for one in journaled if isinstance(one, events.Progressed)]
    assert [(one.process, one.step) for one in found] == [
        ("rank-3", 1),
        ("rank-0", 1),
        ("rank-0", 9),
    ]


def test_the_last_step_of_a_job_that_hangs_is_journaled(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = reports_to(Recorder(folder, Observer()))
    for step in (1, 2, 3):
        reports.add("gpu01", "rank-0.progress", made(step))
    reports.write_due()  # too soon
    now = time.monotonic() + LEAST_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: now)
    reports.write_due()
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    assert [one.report.step for one in journaled if isinstance(one, events.Progressed)] == [1, 3]


def test_the_journal_is_finer_at_the_beginning(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.monotonic()
    reports = reports_to(Recorder(folder, Observer()))
    for at, step in ((0, 1), (2, 2), (4, 3), (5000, 4), (5005, 5), (5005 + MOST_SECONDS, 6)):
        monkeypatch.setattr(time, "monotonic", lambda now=begun + at: now)
        reports.add("gpu01", "rank-0.progress", made(step))
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    steps = [one.report.step for one in journaled if isinstance(one, events.Progressed)]
    assert steps == [1, 2, 3, 4, 6]


def test_the_journal_has_the_lowest_rank_that_reports(folder: RunFolder) -> None:
    """Also if it is not rank 0, as where only the last stage of a pipeline knows the loss."""
    reports = reports_to(Recorder(folder, Observer()))
    for host, rank in (("gpu02", 3), ("gpu02", 2), ("gpu02", 3)):
        reports.add(host, f"rank-{rank}.progress", made(rank))
        reports.close()
    journaled = [event for _, event in JournalReader(folder.journal).read()]
    steps = [one.report.step for one in journaled if isinstance(one, events.Progressed)]
    assert steps == [3, 2]


def test_the_last_step_does_not_depend_on_the_order_of_reports(folder: RunFolder) -> None:
    """A restart gives up if attempts end at the same step."""
    reports = reports_to(Recorder(folder, Observer()))
    assert reports.step is None
    for host, rank, step in (("gpu01", 0, 7), ("gpu02", 2, 6), ("gpu01", 0, 5)):
        reports.add(host, f"rank-{rank}.progress", made(step))
    # Rank 0 resumed from a checkpoint.
    assert reports.step == 6


def test_what_is_wrong_with_a_report_is_shown_once_for_each_host(folder: RunFolder) -> None:
    reports = reports_to(Recorder(folder, notices := Notices()))
    bad = {"event": "progress", "time": 1.0, "step": "7", "total": None}
    # Their workers are alive.
    assert reports.add("gpu01", "rank-1.progress", bad)
    assert reports.add("gpu01", "rank-2.progress", {**bad, "event": "steps"})
    assert reports.add("gpu02", "rank-3.progress", bad)
    error = "progress.step: expected an integer, got '7'"
    assert notices.shown == [
        f"gpu01: ignored a report of rank-1: {error}",
        f"gpu02: ignored a report of rank-3: {error}",
    ]


def test_what_counts_as_activity(folder: RunFolder) -> None:
    reports = reports_to(Recorder(folder, Observer()))
    assert reports.add("gpu01", "rank-1.progress", STEPS)
    assert not reports.add("gpu01", "rank-1.progress", {**STEPS, "waits": "ranks"})
    assert reports.add("gpu01", "rank-1.progress", ["not a report"])


def test_phases_of_a_newer_runtime_are_left_out() -> None:
    newer = {**STEPS, "phases": {"save": 1.0, "evaluation": 2.0}}
    assert StepReport.read("rank-0", newer).phases == {"save": 1.0}
    assert progress.PHASES == steps.PHASES
