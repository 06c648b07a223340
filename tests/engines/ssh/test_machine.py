"""The attempt's state machine: every reachable state of two hosts, and every event in it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import get_args

import pytest

from dtrain.engines.ssh.machine import (
    CLEANING,
    FAILURE_GRACE,
    SERVICE_SECONDS,
    TABLE,
    AbortHost,
    Alarm,
    AttemptAction,
    AttemptEvent,
    AttemptOutcome,
    AttemptPhase,
    AttemptState,
    CutOff,
    Detached,
    HostCondition,
    HostEnded,
    HostLost,
    HostReady,
    HostRefused,
    Hung,
    Interrupted,
    KillHost,
    LauncherFailed,
    SetAlarm,
    StartHost,
    StopHost,
    WorkerExited,
    WorkerId,
    begin,
    step,
)
from support.walk import transitions

HOSTS = ["a", "b"]
WORKERS = [WorkerId("a", "worker", 0), WorkerId("b", "worker", 1)]
SERVICE = WorkerId("b", "ps", 0)
EVENTS: list[AttemptEvent] = [
    *(kind(host) for kind in (HostReady, HostRefused, HostEnded, HostLost) for host in HOSTS),
    *(WorkerExited(worker, failed) for worker in [*WORKERS, SERVICE] for failed in (True, False)),
    Interrupted(),
    Interrupted(kill=True),
    Detached(),
    CutOff(),
    LauncherFailed(),
    Hung(),
    Alarm(),
]
OVER = (HostCondition.CLEAN, HostCondition.LOST)


def start(*, service: bool = False) -> AttemptState:
    return begin(HOSTS, WORKERS, [SERVICE] if service else [], grace=10.0)


def run(state: AttemptState, *events: AttemptEvent) -> tuple[AttemptState, list[AttemptAction]]:
    """The state after all events, and the actions of the last."""
    actions: list[AttemptAction] = []
    for event in events:
        state, actions = step(state, event)
    return state, actions


def running(*, service: bool = False) -> AttemptState:
    return run(start(service=service), HostReady("a"), HostReady("b"))[0]


@functools.cache
def walk() -> list[tuple[AttemptState, AttemptEvent, AttemptState, list[AttemptAction]]]:
    return transitions([start(), start(service=True)], EVENTS, step)


def test_the_walk_fires_every_event() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(AttemptEvent))


def test_a_hung_job_is_killed_at_once() -> None:
    state, actions = run(running(), Hung())
    assert (state.phase, state.outcome) == (AttemptPhase.STOPPING, AttemptOutcome.WORKER_FAILED)
    assert [StopHost("a", 0.0), StopHost("b", 0.0)] == [
        one for one in actions if isinstance(one, StopHost)
    ]


def test_the_table_has_every_phase_and_event() -> None:
    assert set(TABLE) == set(get_args(AttemptEvent))
    assert all(len(row) == len(AttemptPhase) for row in TABLE.values())


def test_every_phase_is_reached() -> None:
    assert {state.phase for state, *_ in walk()} == set(AttemptPhase)


def test_the_first_outcome_stays() -> None:
    for state, _, after, _ in walk():
        if state.outcome is not None:
            assert after.outcome is state.outcome


def test_nothing_starts_unless_all_are_ready() -> None:
    for state, event, after, actions in walk():
        started = {action.host for action in actions if isinstance(action, StartHost)}
        if started:
            assert isinstance(event, HostReady)
            assert state.phase is AttemptPhase.PREPARING
            assert started == set(HOSTS)
            others = [now for host, now in state.hosts.items() if host != event.host]
            assert others == [HostCondition.READY]
            assert after.phase is AttemptPhase.RUNNING


def test_an_end_leaves_no_host_unaccounted_for() -> None:
    for _, _, after, _ in walk():
        if after.phase is AttemptPhase.ENDED:
            assert all(now in OVER for now in after.hosts.values())
            assert after.outcome is not None


def test_the_end_is_final_and_silent() -> None:
    for state, event, after, actions in walk():
        if state.phase in (AttemptPhase.ENDED, AttemptPhase.DETACHED):
            assert actions == []
            assert after == state or isinstance(event, Detached)


def test_a_launcher_can_leave_at_any_time_and_changes_nothing() -> None:
    for state, event, after, actions in walk():
        if isinstance(event, Detached):
            assert after == replace(state, phase=AttemptPhase.DETACHED)
            assert actions == []


def test_orders_go_only_to_hosts_that_may_still_run_something() -> None:
    for state, _, _, actions in walk():
        for action in actions:
            if isinstance(action, StopHost | KillHost):
                assert state.hosts[action.host] not in OVER


def test_every_wait_has_an_alarm() -> None:
    """A phase that waits for hosts cannot wait for ever."""
    for state, event, after, actions in walk():
        waits = after.phase in (AttemptPhase.GIVING_UP, AttemptPhase.STOPPING, AttemptPhase.KILLING)
        if waits and (state.phase is not after.phase or isinstance(event, Alarm)):
            assert any(isinstance(action, SetAlarm) for action in actions), (state, event)


def test_two_alarms_or_two_interrupts_end_any_stop() -> None:
    for state, *_ in walk():
        if state.phase in (AttemptPhase.STOPPING, AttemptPhase.KILLING):
            for event in (Alarm(), Interrupted()):
                assert run(state, event, event)[0].phase is AttemptPhase.ENDED


def test_a_run_that_goes_well() -> None:
    state, actions = run(start(), HostReady("b"), HostReady("a"))
    assert actions == [StartHost("a"), StartHost("b")]
    assert state.started
    state, _ = run(
        state, WorkerExited(WORKERS[0], False), HostEnded("a"), WorkerExited(WORKERS[1], False)
    )
    assert (state.phase, state.outcome) == (AttemptPhase.STOPPING, AttemptOutcome.DONE)
    assert run(state, HostEnded("b"))[0].phase is AttemptPhase.ENDED


def test_a_failed_worker_stops_every_host_soon() -> None:
    state, actions = run(running(), WorkerExited(WORKERS[1], True))
    assert state.outcome is AttemptOutcome.WORKER_FAILED
    assert actions[:2] == [StopHost("a", FAILURE_GRACE), StopHost("b", FAILURE_GRACE)]


def test_services_stop_when_the_workers_are_done() -> None:
    done = [WorkerExited(worker, False) for worker in WORKERS]
    state, actions = run(running(service=True), *done)
    assert state.outcome is AttemptOutcome.DONE
    assert StopHost("b", FAILURE_GRACE) in actions


def test_a_service_may_finish_before_the_workers() -> None:
    done = [WorkerExited(worker, False) for worker in [SERVICE, *WORKERS]]
    state, actions = run(running(service=True), *done)
    assert (state.outcome, actions) == (AttemptOutcome.DONE, [SetAlarm(CLEANING)])


def test_a_service_that_dies_early_fails_the_run() -> None:
    state, actions = run(running(service=True), WorkerExited(SERVICE, True))
    assert (state.phase, actions) == (AttemptPhase.RUNNING, [SetAlarm(SERVICE_SECONDS)])
    assert run(state, Alarm())[0].outcome is AttemptOutcome.WORKER_FAILED
    assert run(state, WorkerExited(WORKERS[1], True))[0].outcome is AttemptOutcome.WORKER_FAILED


def test_a_service_that_fails_as_the_workers_are_done_does_not_fail_the_run() -> None:
    """It may be the first to notice."""
    failed = [WorkerExited(WORKERS[0], False), WorkerExited(SERVICE, True)]
    state, _ = run(running(service=True), *failed, WorkerExited(WORKERS[1], False), HostEnded("b"))
    assert state.outcome is AttemptOutcome.DONE
    assert run(state, Alarm())[0].outcome is AttemptOutcome.DONE


def test_a_host_whose_service_has_failed_may_end_before_the_alarm() -> None:
    workers = [WorkerId("a", "worker", 0)]
    state = begin(HOSTS, workers, [SERVICE], grace=10.0)
    events = [HostReady("a"), HostReady("b"), WorkerExited(SERVICE, True), HostEnded("b")]
    state, _ = run(state, *events)
    assert (state.phase, state.outcome) == (AttemptPhase.RUNNING, None)
    assert run(state, Alarm())[0].outcome is AttemptOutcome.WORKER_FAILED
    done, _ = run(state, WorkerExited(workers[0], False))
    assert done.outcome is AttemptOutcome.DONE


def test_a_refusal_waits_for_the_other_hosts() -> None:
    state, actions = run(start(), HostRefused("a"))
    assert (state.phase, actions) == (AttemptPhase.GIVING_UP, [SetAlarm(3.0)])
    state, actions = run(state, HostReady("b"))
    assert actions[0] == AbortHost("b")
    assert run(state, HostEnded("b"))[0].phase is AttemptPhase.ENDED


@pytest.mark.parametrize(
    "last", [HostReady("b"), HostRefused("b"), Alarm(), Interrupted(), LauncherFailed()]
)
def test_a_refusal_never_starts_anything(last: AttemptEvent) -> None:
    state, actions = run(start(), HostRefused("a"), last)
    assert state.outcome is AttemptOutcome.HOST_FAILED
    assert not any(isinstance(action, StartHost) for action in actions)


def test_a_second_refusal_does_not_delay_the_end() -> None:
    three = begin([*HOSTS, "c"], WORKERS, [], grace=10.0)
    state, actions = run(three, HostRefused("a"), HostRefused("b"))
    assert (state.phase, actions) == (AttemptPhase.GIVING_UP, [])


def test_a_host_that_is_ready_too_late_is_aborted() -> None:
    state, _ = run(start(), HostReady("a"), Interrupted())
    assert run(state, HostReady("b"))[1] == [AbortHost("b")]


def test_a_person_gets_grace_then_force_then_an_end() -> None:
    state, actions = run(running(), Interrupted())
    assert actions == [StopHost("a", 10.0), StopHost("b", 10.0), SetAlarm(10.0 + CLEANING)]
    state, actions = run(state, HostEnded("a"), Interrupted())
    assert actions[:1] == [KillHost("b")]
    state, _ = run(state, Interrupted())
    assert state.phase is AttemptPhase.ENDED
    assert state.hosts == {"a": HostCondition.CLEAN, "b": HostCondition.LOST}
    assert state.outcome is AttemptOutcome.INTERRUPTED


def test_a_person_may_skip_the_grace() -> None:
    state, actions = run(running(), Interrupted(kill=True))
    assert actions == [StopHost("a", 0.0), StopHost("b", 0.0), SetAlarm(CLEANING)]
    assert run(state, Interrupted())[0].phase is AttemptPhase.ENDED


def test_a_host_whose_workers_are_done_may_end_first() -> None:
    state, actions = run(running(), WorkerExited(WORKERS[1], False), HostEnded("b"))
    assert (state.phase, actions) == (AttemptPhase.RUNNING, [])


def test_a_host_that_ends_owing_a_worker_fails_the_run() -> None:
    state, actions = run(running(), HostEnded("a"))
    assert state.outcome is AttemptOutcome.HOST_FAILED
    assert actions[:1] == [StopHost("b", FAILURE_GRACE)]


@pytest.mark.parametrize("service", [False, True])
def test_a_host_that_is_lost_after_its_workers_finished_does_not_fail_the_run(
    *, service: bool
) -> None:
    state, actions = run(running(service=service), WorkerExited(WORKERS[0], False), HostLost("a"))
    assert (state.phase, state.outcome, actions) == (AttemptPhase.RUNNING, None, [])
    state, _ = run(state, WorkerExited(WORKERS[1], False), HostEnded("b"))
    assert (state.phase, state.outcome) == (AttemptPhase.ENDED, AttemptOutcome.DONE)
    assert state.hosts == {"a": HostCondition.LOST, "b": HostCondition.CLEAN}


def test_a_lost_host_with_a_worker_or_a_service_fails_the_run() -> None:
    assert run(running(), HostLost("a"))[0].outcome is AttemptOutcome.HOST_FAILED
    for end in (HostLost("b"), HostEnded("b")):
        state, _ = run(running(service=True), WorkerExited(WORKERS[1], False), end)
        assert state.outcome is AttemptOutcome.HOST_FAILED


def test_the_end_of_a_rank_copies_only_the_ranks_of_its_host() -> None:
    """The work for all ends of a large job then does not grow with the square of its ranks."""
    before = running()
    after, _ = step(before, WorkerExited(WORKERS[0], False))
    assert after.awaited.keys() == {"b"}
    assert after.awaited["b"] is before.awaited["b"]
