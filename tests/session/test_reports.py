"""The last reports of a worker, written while the link closes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dtrain.runs import events
from dtrain.session.reports import ProgressReports


def test_a_report_during_the_end_is_journaled_once() -> None:
    written: list[str] = []

    def record(event: Any) -> None:
        written.append(type(event).__name__)
        # Meanwhile the connection's thread writes the other event.
        reports._write("phases")

    recorder: Any = SimpleNamespace(record=record, observer=None)
    plan: Any = SimpleNamespace(job=SimpleNamespace(ranked=True))
    steps: Any = None
    reports = ProgressReports(plan, recorder, steps)
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
    steps: Any = None
    reports = ProgressReports(plan, recorder, steps)
    bad = {"event": "progress", "time": 1.0, "step": "7", "total": None}
    reports.add("gpu01", "rank-1", bad)
    reports.add("gpu01", "rank-2", {**bad, "event": "steps"})
    reports.add("gpu02", "rank-3", {**bad, "event": "lunch"})
    reports.add("gpu02", "rank-3", [bad])
    assert shown == [
        "gpu01: ignored a report of rank-1: progress.step: expected an integer, got '7'"
    ]
