"""Goodput against runs whose losses are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.failures.stalls import Stall
from dtrain.runs import events, restart
from dtrain.runs.events import JournalEvent
from dtrain.runs.goodput import CLASSES, Goodput, goodput
from dtrain.runs.progress import Progress
from support.stored import FAILURE

BEGIN = 1.7e9
SKEW = 37.5
"""How far the host's clock is ahead."""


class Run:
    """A run whose journal is written while its truth is counted."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.records: list[tuple[float, JournalEvent]] = []
        self.truth = dict.fromkeys(CLASSES, 0.0)
        self.phases: dict[str, float] = {}
        self.step = 0
        self.skew = SKEW
        self.write(events.RunStarted(("n1", "n2")))

    def write(self, event: JournalEvent) -> None:
        self.records.append((self.now + 0.1, event))

    def spend(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.truth[what] += seconds

    def report(self) -> None:
        at = self.now + self.skew
        self.write(events.Progressed(Progress("rank-0", at, self.step, 10_000, 1.0, None, {})))

    def begin(self, seconds: float, load: float = 0.0) -> None:
        """Start an attempt, until its first step is done."""
        self.phases = {"load": load} if load else {}
        self.spend("load", load)
        self.spend("start", seconds)
        self.step += 1
        self.report()
        self._tell_phases()

    def train(self, steps: int, data: float = 0.0, what: str = "steps") -> None:
        """Steps of one second each, and waits for data; a report every 10 steps."""
        for number in range(steps):
            self.spend(what, 1.0)
            self.spend(what if what == "lost" else "data", data)
            self.phases["data"] = self.phases.get("data", 0.0) + data
            self.step += 1
            if number % 10 == 9:
                self.report()
                self._tell_phases()

    def save(self, seconds: float) -> None:
        self.spend("save", seconds)
        self.phases["save"] = self.phases.get("save", 0.0) + seconds
        self._tell_phases()

    def _tell_phases(self) -> None:
        self.write(events.PhasesSpent(self.now + self.skew, self.step, dict(self.phases), "rank-0"))

    def fail(self, attempt: int, stopping: float, wait: float, step: int) -> None:
        """A worker fails; the next attempt begins after ``wait`` and continues after ``step``."""
        failed = replace(FAILURE, time=self.now)
        self.spend("other", stopping)
        report = Report(ExitCode.JOB_FAILED, "rank 3 failed", failures=(failed,))
        result = restart.AttemptResult(True, self.step, "n2")
        self.write(events.AttemptFailed(attempt, result, report))
        self.spend("waiting", wait)
        self.write(events.NextAttempt(attempt + 1, ("n1", "n2")))
        self.step = step

    def end(self) -> None:
        self.write(events.Finished(Report(ExitCode.OK, "all 4 workers finished")))


def check(run: Run, found: Goodput) -> None:
    assert sum(found.seconds.values()) == pytest.approx(found.wall, abs=1e-6)
    assert found.wall == pytest.approx(run.now - BEGIN, abs=0.2)
    for name in CLASSES:
        assert found.seconds[name] == pytest.approx(run.truth[name], abs=0.01 * found.wall), name


def test_losses_are_found_within_one_percent() -> None:
    run = Run()
    run.begin(30)
    run.train(100, data=0.2)
    run.save(12)
    # The journal has the first four of them, and the number of the last one.
    run.train(45, what="lost")
    run.fail(1, stopping=4, wait=25, step=101)
    run.begin(20, load=9)
    run.train(200)
    run.save(15)
    run.spend("other", 6)
    run.end()
    found = goodput(run.records, now=0)
    check(run, found)
    assert found.share == pytest.approx(run.truth["steps"] / (run.now - BEGIN), abs=0.01)
    first, second = found.attempts
    assert (first.first_step, first.ok, first.why) == (1, False, "rank 3 failed")
    assert (second.first_step, second.last_step, second.ok) == (102, 302, True)
    assert (first.end - first.over, second.end - second.over) == pytest.approx((25, 0), abs=0.2)


def test_a_damaged_checkpoint_loses_steps_of_two_attempts() -> None:
    run = Run()
    run.begin(10)
    run.train(50)
    run.save(5)
    run.train(40, what="lost")
    run.fail(1, stopping=2, wait=3, step=91)
    run.begin(10)
    # Its first step is lost, too: only the start is counted for it.
    run.train(60, what="lost")
    run.fail(2, stopping=2, wait=3, step=51)
    run.begin(10)
    run.train(100)
    run.end()
    check(run, goodput(run.records, now=0))


def test_a_hang_counts_from_the_last_step_on() -> None:
    run = Run()
    run.begin(10)
    run.train(100)
    run.spend("hung", 40)
    run.write(events.StallChanged(Stall(("rank-3",), ("n2",), 40.0, run.step, 3)))
    run.spend("hung", 60)
    run.write(events.StopRequested("no output and no progress from any worker for 100 s"))
    run.spend("other", 5)
    run.write(events.Finished(Report(ExitCode.JOB_FAILED, "no output")))
    check(run, goodput(run.records, now=0))


def test_a_hang_that_only_the_watchdog_sees() -> None:
    """As with a short `silence`, or with steps that a program prints."""
    run = Run()
    run.begin(10)
    run.train(50)
    run.spend("hung", 12)
    # The last report arrived late, and the silence counts from there on.
    run.write(events.HangDetected(11.3, ends=True))
    run.spend("hung", 1)
    result = restart.AttemptResult(True, run.step, None)
    run.write(events.AttemptFailed(1, result, Report(ExitCode.JOB_FAILED, "no output")))
    run.spend("waiting", 8)
    run.write(events.NextAttempt(2, ("n1", "n2")))
    run.begin(10)
    run.train(10)
    run.spend("hung", 20)
    run.write(events.HangDetected(20.0, ends=False))
    run.train(20)
    run.end()
    check(run, goodput(run.records, now=0))


def test_a_pause_that_ended_counts_as_hung_too() -> None:
    run = Run()
    run.begin(10)
    run.train(100)
    run.spend("hung", 50)
    run.write(events.StallChanged(Stall((), (), 50.0, run.step, 0)))
    run.spend("hung", 10)
    run.write(events.StallChanged(None))
    run.train(100)
    run.end()
    check(run, goodput(run.records, now=0))


def test_a_lost_host_and_a_queue_are_waits() -> None:
    run = Run()
    run.write(events.HostState("n1", "queued"))
    run.spend("waiting", 300)
    run.write(events.HostState("n1", "connecting"))
    run.begin(20)
    run.train(100)
    run.write(events.HostState("n2", "unreachable", "no route"))
    run.spend("waiting", 120)
    report = Report(ExitCode.NODE_FAILED, "n2 failed")
    run.write(events.AttemptFailed(1, restart.AttemptResult(True, 101, None), report))
    run.spend("waiting", 30)
    run.write(events.NextAttempt(2, ("n1", "s1")))
    run.begin(20)
    run.train(50)
    found = goodput(run.records, now=run.now)
    check(run, found)
    assert found.attempts[-1].ok is None


@pytest.mark.parametrize("by", [-3600.0, -90.0, 90.0, 3600.0])
def test_a_host_whose_clock_is_set_tells_the_same(by: float) -> None:
    run = Run()
    run.begin(30)
    run.train(100, data=0.2)
    run.skew += by
    run.train(100, data=0.5)
    run.save(20)
    run.end()
    check(run, goodput(run.records, now=0))


@pytest.mark.parametrize("process", ["rank-2", "rank-0"], ids=["another host", "printed"])
@pytest.mark.parametrize("ahead", [-600.0, 600.0])
def test_the_first_report_has_another_clock(process: str, ahead: float) -> None:
    """That of its host, or, if the process first prints its steps, the launcher's."""
    run = Run()
    run.skew = ahead
    run.spend("start", 30)
    first = Progress(process, run.now, 1, 10_000, 1.0, None, {}, printed=process == "rank-0")
    run.write(events.Progressed(first))
    run.begin(0)
    run.train(100, data=0.2)
    run.end()
    check(run, goodput(run.records, now=0))


def test_reports_that_arrive_late_say_nothing_about_the_clock() -> None:
    """The launcher was killed during the start. A later one gets all reports at once."""
    run = Run()
    run.begin(30)
    run.train(300)
    run.records = [(max(then, BEGIN + 330), event) for then, event in run.records]
    run.records[0] = (BEGIN, run.records[0][1])
    run.train(60)
    run.end()
    check(run, goodput(run.records, now=0))


def test_a_run_without_reports_has_no_goodput() -> None:
    run = Run()
    run.spend("start", 12)
    run.write(events.HostState("n1", "running"))
    run.spend("other", 50)
    run.end()
    found = goodput(run.records, now=0)
    check(run, found)
    assert found.share is None
    assert goodput([], now=5.0).wall == 0.0


def test_a_host_that_is_reached_again_does_not_start_again() -> None:
    """Another launcher takes charge of the run."""
    run = Run()
    for host in ("n1", "n2"):
        run.spend("start", 6)
        run.write(events.HostState(host, "running"))
    run.spend("other", 50)
    for state in ("attaching", "running"):
        run.write(events.HostState("n1", state))
    run.spend("other", 50)
    run.end()
    check(run, goodput(run.records, now=0))


def test_a_clock_that_is_set_back_and_odd_reports_never_break_the_sum() -> None:
    nan: Mapping[str, float] = {"data": 1e6, "save": 0.0}
    for now in (0.0, BEGIN + 5, BEGIN + 1e6):
        run = Run()
        run.begin(10)
        run.records += [
            (BEGIN - 500, events.PhasesSpent(0.0, 5, nan)),
            (BEGIN + 20, events.PhasesSpent(BEGIN + 9e9, 3, {})),
            (BEGIN + 3, events.StallChanged(Stall((), (), 1e6, 1, 0))),
        ]
        found = goodput(run.records, now)
        assert sum(found.seconds.values()) == pytest.approx(found.wall)
        assert all(value >= 0 for value in found.seconds.values())
