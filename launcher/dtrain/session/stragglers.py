"""Shows which ranks are slow, when that changes."""

from __future__ import annotations

from dtrain.failures.stragglers import Straggler
from dtrain.runs import events
from dtrain.session.recorder import Recorder
from dtrain.session.steps import StepWatch

BETWEEN = 1.0
"""Seconds between two comparisons of all ranks."""


class StragglerReports:
    """Those of one attempt."""

    def __init__(self, steps: StepWatch, recorder: Recorder) -> None:
        self._steps = steps
        self._recorder = recorder
        self._shown: Straggler | None = None
        self._due = 0.0

    def show(self, now: float) -> None:
        if now < self._due:
            return
        self._due = now + BETWEEN
        found, shown = self._steps.stragglers(now), self._shown
        if found.is_news_after(shown) if found is not None else shown is not None:
            self._shown = found
            self._recorder.record(events.StragglersChanged(found))
