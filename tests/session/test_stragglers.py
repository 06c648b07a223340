"""All ranks are compared once a second, however often the launcher looks."""

from __future__ import annotations

from typing import cast

from dtrain.session.recorder import Recorder
from dtrain.session.steps import StepWatch
from dtrain.session.stragglers import StragglerReports


class Steps:
    def __init__(self) -> None:
        self.compared: list[float] = []

    def stragglers(self, now: float) -> None:
        self.compared.append(now)


def test_comparisons_do_not_take_more_time_with_more_events() -> None:
    steps = Steps()
    reports = StragglerReports(cast(StepWatch, steps), cast(Recorder, None))
    for tenth in range(100, 125):
        reports.show(tenth / 10)
    assert steps.compared == [10.0, 11.0, 12.0]
