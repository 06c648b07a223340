"""What a run measured, and how it differs from its plan. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from dtrain.records import dataclass
from dtrain.runs import events
from dtrain.runs.attempt_events import Records
from dtrain.runs.goodput import Goodput
from dtrain.spec.model import Expected

CLOSE = 0.1
"""A difference below this part of the planned value is normal for an estimate."""


@dataclass(frozen=True, slots=True)
class Point:
    """A report of the job's progress."""

    time: float
    """Seconds since the epoch."""
    loss: float | None
    step_time: float | None
    """Seconds of one step since the report before; None for the first of an attempt."""
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Measured:
    """None for what the run did not report."""

    step_time: float | None
    """Median, in seconds."""
    tokens_per_second: float | None
    """Median, of all ranks together."""
    memory_gib: float | None
    """The most that one GPU used, in those averages of 10 s that were read."""
    data_share: float | None
    """Part of the time of steps in which the job waited for data."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A planned value and the measured one."""

    what: str
    unit: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.planned


def points(records: Records) -> list[Point]:
    """The curves of a run, from the events of its journal."""
    found: list[Point] = []
    before = None
    for then, event in records:
        match event:
            case events.NextAttempt():
                before = None
            case events.Progressed(report):
                seconds = rate = None
                if before is not None and before.source != report.source:
                    before = None
                if before is not None and report.time > before.time and report.step > before.step:
                    spent = report.time - before.time
                    seconds = spent / (report.step - before.step)
                    if report.tokens is not None and before.tokens is not None:
                        rate = max(0, report.tokens - before.tokens) / spent
                found.append(Point(then, report.loss, seconds, rate))
                before = report
    return found


def measured(curve: Sequence[Point], spent: Goodput, memory_gib: float | None) -> Measured:
    training = spent.seconds["steps"] + spent.seconds["data"]
    return Measured(
        _median(point.step_time for point in curve),
        _median(point.tokens_per_second for point in curve),
        memory_gib,
        spent.seconds["data"] / training if training else None,
    )


def differences(expected: Expected, found: Measured, devices: int) -> list[Difference]:
    """The planned values that the run has measured, too. ``devices``: how many it used."""
    pairs = [
        ("step time", "s", expected.step_time, found.step_time),
        ("peak memory", "GiB", expected.memory_gib, found.memory_gib),
    ]
    rate = found.tokens_per_second
    mfu = expected.mfu(rate, devices) if rate is not None else None
    if mfu is not None and expected.step_time and found.step_time:
        # The steps are the same, so the planned MFU follows from the measured one.
        pairs.insert(1, ("MFU", "%", mfu * 100 * found.step_time / expected.step_time, mfu * 100))
    return [
        Difference(what, unit, planned, value)
        for what, unit, planned, value in pairs
        if planned and value is not None
    ]


def explanation(
    found: Measured, of: Sequence[Difference], *, slow: bool, compute_time: float | None
) -> str:
    """Which part differs from the plan, as a sentence; empty if the run is close to it. ``slow``:
    whether some ranks are. ``compute_time``: the seconds of computation in a planned step."""
    time = next((one for one in of if one.what == "step time"), None)
    if time is None or abs(time.ratio - 1) <= CLOSE:
        return ""
    if time.ratio < 1:
        return "steps are faster than planned: `dtrain plan --calibrate-run` learns from this run"
    extra = time.measured - time.planned
    waits = (found.data_share or 0.0) * time.measured
    if waits >= extra / 2:
        return (
            f"of the {extra:.3g} s more in each step, {min(waits, extra):.3g} s are waits for data"
        )
    if slow:
        return "slow ranks held up the others; see slow ranks"
    planned = ""
    if compute_time is not None:
        rest = max(0.0, time.planned - compute_time)
        planned = f" ({compute_time:.3g} s and {rest:.3g} s of a step)"
    return f"computation or communication is slower than planned{planned}, not the wait for data"


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
