"""The last reports of a worker, written while the link closes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dtrain.runs import events, progress
from dtrain.runs.progress import StepReport
from dtrain.runtime import steps
from dtrain.session.reports import ProgressReports


def test_a_report_during_the_end_is_journaled_once() -> None:
    written: list[str] = []

    def record(event: Any) -> None:
        written.append(type(event).__name__)
        # Meanwhile the connection's thread writes the other event.
        reports._write("phases")

    recorder: Any = SimpleNamespace(record=record, observer=None)
    plan: Any = SimpleNamespace(job=SimpleNamespace(ranked=True))
    watch: Any = None
    reports = ProgressReports(plan, recorder, watch)
    progress: Any = None
    reports._unwritten = {
        "progress": events.Progressed(progress),
        "phases": events.PhasesSpent(0.0, 1, {}),
    }
    reports.close()
    assert written == ["Progressed", "PhasesSpent"]


def test_what_is_wrong_with_a_report_is_shown_once_for_each_host() -> None:
    shown: list[str] = []
    kinds: set[str] = set()

    def notice_once(text: str, *, kind: str) -> None:
        if kind not in kinds:
            shown.append(text)
        kinds.add(kind)

    recorder: Any = SimpleNamespace(notice_once=notice_once)
    plan: Any = SimpleNamespace(job=SimpleNamespace(ranked=True))
    watch: Any = None
    reports = ProgressReports(plan, recorder, watch)
    bad = {"event": "progress", "time": 1.0, "step": "7", "total": None}
    # Their workers are alive.
    assert reports.add("gpu01", "rank-1.progress", bad)
    assert reports.add("gpu01", "rank-2.progress", {**bad, "event": "steps"})
    assert reports.add("gpu02", "rank-3.progress", bad)
    error = "progress.step: expected an integer, got '7'"
    assert shown == [
        f"gpu01: ignored a report of rank-1: {error}",
        f"gpu02: ignored a report of rank-3: {error}",
    ]


def test_what_counts_as_activity() -> None:
    plan: Any = SimpleNamespace(job=SimpleNamespace(ranked=True))
    watch: Any = SimpleNamespace(add=lambda *_: None)
    recorder: Any = None
    reports = ProgressReports(plan, recorder, watch)
    made = {"event": "steps", "done": 3, "waits": None, "group": 1, "blocks": [], "time": 1.0}
    assert reports.add("gpu01", "rank-1.progress", made)
    assert not reports.add("gpu01", "rank-1.progress", {**made, "waits": "ranks"})
    assert reports.add("gpu01", "rank-1.progress", ["not a report"])
    # A newer `dtrain.runtime` may have more phases.
    newer = StepReport.read("rank-0", {**made, "phases": {"save": 1.0, "evaluation": 2.0}})
    assert newer.phases == {"save": 1.0}
    assert progress.PHASES == steps.PHASES
