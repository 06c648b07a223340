"""Progress reports of workers, and the pace computed from them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.messages.decode import ProtocolError
from dtrain.runs.progress import WINDOW, Pace, Progress, Representative, speaker
from support.runs import plan

SAID: dict[str, Any] = {
    "time": 100.0, "step": 3, "total": 10, "loss": 2.5, "tokens": 300, "metrics": {"lr": 0.1},
    "printed": False,
}  # fmt: skip


def report(time: float, step: int, tokens: int | None = None, total: int | None = 100) -> Progress:
    return Progress("rank-0", time, step, total, None, tokens, {})


def test_a_report_is_read() -> None:
    read = Progress.read("rank-12", SAID)
    assert read == Progress("rank-12", 100.0, 3, 10, 2.5, 300, {"lr": 0.1})


@pytest.mark.parametrize(
    ("process", "change"),
    [
        ("../etc", {}),
        ("rank-x", {}),
        ("rank-0", {"step": "many"}),
        ("rank-0", {"step": None}),
        ("rank-0", {"metrics": {"a": []}}),
        ("rank-0", {"metrics": None}),
        ("rank-0", {"metrics": ["a"]}),
        ("rank-0", {"metrics": {"": 1.0}}),
        ("rank-0", {"metrics": {"a\x1b": 1.0}}),
        ("rank-0", {"metrics": {"a" * 65: 1.0}}),
        ("rank-0", {"step": True}),
        ("rank-0", {"step": 1.5}),
        ("rank-0", {"step": -1}),
        ("rank-0", {"total": 1 << 63}),
        ("rank-0", {"tokens": 10**400}),
        ("rank-0", {"loss": "2.5"}),
        ("rank-0", {"time": math.nan}),
        ("rank-0", {"time": 1e300}),
        ("rank-0", {"metrics": dict.fromkeys(map(str, range(99)), 1.0)}),
    ],
)
def test_anything_else_is_refused(process: str, change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Progress.read(process, SAID | change)


def test_what_is_journaled_is_what_was_read() -> None:
    loss = {"loss": math.inf, "metrics": {"grad": math.inf}}
    read = Progress.read("rank-0", SAID | loss | {"more": [[[]]]})
    assert read.as_json() == SAID | loss
    assert Progress.read("rank-0", read.as_json()) == read


def test_the_pace_is_that_of_the_last_minute() -> None:
    pace = Pace()
    assert pace.steps_per_second is pace.tokens_per_second is pace.seconds_left is None
    pace.add(report(0.0, 1, 10))
    assert pace.steps_per_second is None
    for second in range(1, 1000):
        # Slow at first, as it is while kernels are compiled.
        step = second // 10 if second <= 500 else 50 + (second - 500) * 2
        pace.add(report(float(second), step, step * 10, total=2000))
    assert pace.steps_per_second == pytest.approx(2.0)
    assert pace.tokens_per_second == pytest.approx(20.0)
    assert pace.seconds_left == pytest.approx((2000 - 1048) / 2)


def test_a_return_to_a_checkpoint_is_no_negative_pace() -> None:
    pace = Pace()
    pace.add(report(0.0, 50))
    pace.add(report(1.0, 51))
    pace.add(report(30.0, 40))
    assert pace.steps_per_second is None
    pace.add(report(31.0, 41))
    assert pace.steps_per_second == pytest.approx(1.0)


def test_a_count_of_tokens_that_begins_again_is_no_negative_pace() -> None:
    pace = Pace()
    pace.add(report(-1.0, 49))
    pace.add(report(0.0, 50, 5000))
    assert pace.tokens_per_second is None
    pace.add(report(1.0, 51, 100))
    assert pace.tokens_per_second is None
    pace.add(report(2.0, 52, 200))
    assert pace.tokens_per_second == pytest.approx(100.0)
    assert pace.steps_per_second == pytest.approx(1.0)


@pytest.mark.parametrize("change", [{"process": "rank-3"}, {"printed": True}])
def test_the_pace_of_another_process_begins_anew(change: dict[str, Any]) -> None:
    """The clocks of two hosts may differ, also from that of the launcher, which reads output."""
    pace = Pace()
    pace.add(replace(report(0.0, 50), **change))
    pace.add(report(0.1, 60))
    assert pace.steps_per_second is None
    pace.add(report(1.1, 61))
    assert pace.steps_per_second == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(0, 10 * WINDOW), st.integers(0, 1000)), min_size=2))
def test_no_order_of_reports_breaks_it(reports: list[tuple[float, int]]) -> None:
    pace = Pace()
    for time, step in reports:
        pace.add(report(time, step))
        assert (pace.steps_per_second or 0) >= 0
        assert (pace.seconds_left or 0) >= 0


@pytest.mark.parametrize(
    "processes", [("rank-12", "rank-2"), ("evaluator-0", "ps-0", "worker-1", "worker-0", "chief-0")]
)
def test_the_first_process_that_reports_represents_the_job(processes: tuple[str, ...]) -> None:
    one = Representative()
    reports = [replace(report(0.0, 1), process=process) for process in processes]
    assert one.reports(replace(reports[-1], printed=True))
    assert [one.reports(each) for each in reports] == [True] * len(reports)
    assert not one.reports(reports[0])
    assert one.reports(reports[-1])
    assert not one.reports(replace(reports[-1], printed=True))


def test_the_process_that_reports_for_the_job() -> None:
    assert speaker(plan()) == "rank-0"
