"""What is known of a run after its events."""

from __future__ import annotations

from dataclasses import replace

from dtrain.failures.cause import ExitCode, Report
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.runs import events
from dtrain.runs.observed import ObservedAttempt, ObservedRun
from dtrain.runs.progress import Progress
from support.runs import plan

SLOW = Straggler(("rank-1",), ("b",), False, 0.2, "clock", 3)
STALL = Stall(("rank-1",), ("b",), 20.0, 3, 1)
BEFORE: list[events.RunEvent] = [
    events.RunStarted(("a", "b")),
    events.HostState("a", "running"),
    events.TensorBoardAddress("a", "TensorBoard of a: http://127.0.0.1:1"),
    events.Progressed(Progress("rank-0", 1.0, 8, 100, None, None, {})),
    events.StragglersChanged(SLOW),
    events.StallChanged(STALL),
    events.StopRequested("Ctrl-C"),
]


def observed(*then: events.RunEvent) -> ObservedAttempt:
    return ObservedRun.of((float(at), one) for at, one in enumerate([*BEFORE, *then])).attempt


def test_a_stall_goes_on_until_its_end_is_known() -> None:
    stall = observed().stall_at(105.0)
    assert stall is not None
    assert stall.seconds == 20 + 100
    assert observed(events.StallChanged(None)).stall_at(105.0) is None


def test_the_next_attempt_begins_with_nothing() -> None:
    assert observed(events.NextAttempt(2, ("a", "b"))) == ObservedAttempt(2, 7.0)


def test_the_next_launcher_reports_again_what_still_holds() -> None:
    before, after = observed(), observed(events.LauncherAttached())
    assert (after.slow, after.stall, after.tensorboards) == (None, None, {})
    assert (after.hosts, after.progress) == (before.hosts, before.progress)
    assert after.stop_reason == "Ctrl-C"


def test_a_follower_begins_with_the_attempt_of_the_record() -> None:
    assert observed(events.RunAttached("run-1", replace(plan(), attempt=3), "")).number == 3
    assert observed(events.RunAttached("run-1", plan(), "")).progress == observed().progress


def test_nothing_of_a_finished_run_is_slow_or_stands_still() -> None:
    after = observed(events.Finished(Report(ExitCode.JOB_FAILED, "rank 0 failed")))
    assert (after.slow, after.stall) == (None, None)
    assert after.progress == observed().progress


def test_numbered_hosts_are_gone_once_an_engine_names_them() -> None:
    after = observed(events.HostsAllocated(("n1", "n2")))
    assert (after.hosts, after.allocated) == ({}, ("n1", "n2"))


def test_a_clock_that_is_set_back_ends_no_run_before_its_begin() -> None:
    run = ObservedRun.of(
        [(100.0, events.NextAttempt(1, ("a",))), (40.0, events.LauncherAttached())]
    )
    assert run.until(200.0, attended=False) == 100.0
    assert run.until(50.0, attended=False) == 50.0  # it had run ahead
    assert run.until(200.0, attended=True) == 200.0
    assert run.until(50.0, attended=True) == 100.0  # the time of day was set back
