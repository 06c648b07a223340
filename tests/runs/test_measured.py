"""How a run differs from its plan."""

from __future__ import annotations

import pytest

from dtrain.runs.events import Progressed
from dtrain.runs.measured import Difference, Measured, explanation, points
from dtrain.runs.progress import Progress


@pytest.mark.parametrize(
    ("seconds", "data_share", "slow", "compute_time", "said"),
    [
        (10.9, 0.9, True, 8.0, ""),
        (8.0, None, False, 8.0, "steps are faster than planned"),
        (20.0, 0.3, True, 8.0, "of the 10 s more in each step, 6 s are waits for data"),
        (20.0, 0.1, True, 8.0, "slow ranks held up the others"),
        (20.0, 0.1, False, 8.0, "slower than planned (8 s and 2 s of a step), not the wait for"),
        (20.0, None, False, None, "slower than planned, not the wait for data"),
    ],
)
def test_what_made_the_steps_slower_than_planned(
    seconds: float, data_share: float | None, slow: bool, compute_time: float | None, said: str
) -> None:
    """The plan: 10 s a step."""
    found = Measured(seconds, None, None, data_share)
    difference = Difference("step time", "s", 10.0, seconds)
    text = explanation(found, [difference], slow=slow, compute_time=compute_time)
    assert said in text if said else not text


def test_a_step_has_no_time_between_reports_of_two_sources() -> None:
    reports = [
        Progress(process, float(step), step, None, None, None, {}, printed)
        for process, printed, steps in (
            ("rank-0", True, (1, 3)), ("rank-0", False, (5, 7)), ("rank-3", False, (9, 11)),
        )
        for step in steps
    ]  # fmt: skip
    curve = points([(one.time, Progressed(one)) for one in reports])
    assert [point.step_time for point in curve] == [None, 1.0] * 3
