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
