"""The life of one launch, as a table: what a session does about everything that can happen.

Theory of operation
-------------------
All hosts are prepared before any starts (``PREPARING``). The moment the last one is ready, all
start together (``RUNNING``). If one cannot start, the others get a moment to say what is wrong
with them too (``GIVING_UP``), and then all are told to forget it.

A run ends for one ``Outcome``, and the first to come stays: every worker finished, a worker
failed, a host failed, or a person asked. From then on the only aim is that nothing is left
running (``STOPPING``): each host is asked to stop and says when it is clean. Asking twice, or a
host that takes too long, turns the request into force (``KILLING``); hosts that do not answer
even then are given up, and the report says so. When every host is clean, or given up, the launch
has ``ENDED``.

`step` is pure: it takes a state and an event and returns the new state with the actions to carry
out. Times are seconds; it reads no clock, but asks for an alarm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

HEAR_THE_OTHERS = 3.0
"""Seconds that other hosts get to say what is wrong with them once one cannot start."""
FAILURE_GRACE = 3.0
"""At most so many seconds between TERM and KILL after a failure: peers of a dead worker only
hang, and the machines are wanted back."""
CLEANING = 10.0
"""Seconds beyond the grace in which a host should have reported that it is clean."""


class Phase(Enum):
    PREPARING = auto()
    GIVING_UP = auto()
    RUNNING = auto()
    STOPPING = auto()
    KILLING = auto()
    ENDED = auto()


class Outcome(Enum):
    """Why a run ended."""

    DONE = auto()
    WORKER_FAILED = auto()
    HOST_FAILED = auto()
    INTERRUPTED = auto()


class HostState(Enum):
    PREPARING = auto()
    READY = auto()
    RUNNING = auto()
    CLEAN = auto()
    """Nothing of the run is left there: it ended, was refused, or never began."""
    LOST = auto()
    """Nobody knows: it cannot be reached, or did not answer."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A process of the plan, as the machine tells it from others."""

    host: str
    role: str
    index: int


@dataclass(frozen=True, slots=True)
class State:
    phase: Phase
    hosts: dict[str, HostState]
    awaited: frozenset[Worker]
    """Processes whose end the run waits for: all but services."""
    services: frozenset[Worker]
    grace: float
    """Seconds between TERM and KILL when a person stops the job."""
    outcome: Outcome | None = None


# Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    host: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A host cannot be reached or prepared; nothing of the run is left there."""

    host: str


@dataclass(frozen=True, slots=True)
class Exited:
    worker: Worker
    failed: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """A host reports that nothing of the run is left running there."""

    host: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A host that was running can no longer be reached, or cannot say how it ended."""

    host: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A person, or the system, asks the launch to end."""


@dataclass(frozen=True, slots=True)
class Hung:
    """The job has made no progress for longer than it may."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The launching machine itself cannot go on: its disk is full, say."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """The alarm that was set has come."""


Event = Prepared | Refused | Exited | Ended | Lost | Interrupted | Hung | Broken | Alarm


# Actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    host: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a host that has not started; it answers with ``Ended``."""

    host: str


@dataclass(frozen=True, slots=True)
class Stop:
    host: str
    grace: float


@dataclass(frozen=True, slots=True)
class Kill:
    host: str


@dataclass(frozen=True, slots=True)
class SetAlarm:
    """Send ``Alarm`` in so many seconds; a later alarm replaces an earlier one."""

    seconds: float


Action = Start | Abort | Stop | Kill | SetAlarm
Step = tuple[State, list[Action]]


def begin(
    hosts: list[str], awaited: list[Worker], services: list[Worker], *, grace: float
) -> State:
    """The state before anything has happened. ``hosts`` is in node-rank order."""
    return State(
        phase=Phase.PREPARING,
        hosts=dict.fromkeys(hosts, HostState.PREPARING),
        awaited=frozenset(awaited),
        services=frozenset(services),
        grace=grace,
    )


def attached(
    hosts: list[str], awaited: list[Worker], services: list[Worker], *, grace: float
) -> State:
    """The state of a run that was started before: whatever has happened since is yet to be told."""
    state = begin(hosts, awaited, services, grace=grace)
    return replace(state, phase=Phase.RUNNING, hosts=dict.fromkeys(hosts, HostState.RUNNING))


def step(state: State, event: Event) -> Step:
    """The state after ``event``, and what to do now, in order."""
    return TABLE[state.phase, type(event)](state, event)


# Transitions ----------------------------------------------------------------------------------


def _ignore(state: State, event: Event) -> Step:
    return state, []


def _host_ready(state: State, event: Event) -> Step:
    assert isinstance(event, Prepared)
    state = _mark(state, event.host, HostState.READY)
    if any(host is not HostState.READY for host in state.hosts.values()):
        return state, []
    started = dict.fromkeys(state.hosts, HostState.RUNNING)
    return replace(state, phase=Phase.RUNNING, hosts=started), [Start(host) for host in started]


def _host_ready_in_vain(state: State, event: Event) -> Step:
    assert isinstance(event, Prepared)
    return _all_heard(_mark(state, event.host, HostState.READY))


def _too_late_to_be_ready(state: State, event: Event) -> Step:
    assert isinstance(event, Prepared)
    return state, [Abort(event.host)]


def _cannot_start(state: State, event: Event) -> Step:
    assert isinstance(event, Refused | Ended | Lost)
    first = state.phase is Phase.PREPARING
    state = replace(_gone(state, event), phase=Phase.GIVING_UP, outcome=Outcome.HOST_FAILED)
    state, actions = _all_heard(state)
    if first and state.phase is Phase.GIVING_UP:
        actions = [*actions, SetAlarm(HEAR_THE_OTHERS)]
    return state, actions


def _all_heard(state: State) -> Step:
    if HostState.PREPARING in state.hosts.values():
        return state, []
    return _abort(state)


def _abort(state: State) -> Step:
    waiting = [
        host for host, now in state.hosts.items() if now in (HostState.PREPARING, HostState.READY)
    ]
    state = _end_if_clean(replace(state, phase=Phase.STOPPING))
    return state, [*(Abort(host) for host in waiting), *_alarm(state, CLEANING)]


def _give_up(state: State, event: Event) -> Step:
    return _abort(state)


def _interrupted_early(state: State, event: Event) -> Step:
    return _abort(replace(state, outcome=state.outcome or Outcome.INTERRUPTED))


def _worker_exited(state: State, event: Event) -> Step:
    assert isinstance(event, Exited)
    if event.failed:
        grace = min(state.grace, FAILURE_GRACE)
        return _stop(replace(state, outcome=Outcome.WORKER_FAILED), grace)
    awaited = state.awaited - {event.worker}
    services = state.services - {event.worker}
    state = replace(state, awaited=awaited, services=services)
    if awaited:
        return state, []
    state = replace(state, outcome=Outcome.DONE)
    if services:
        return _stop(state, min(state.grace, FAILURE_GRACE))
    # Each host ends by itself once its processes have; the alarm is for one that does not.
    return replace(state, phase=Phase.STOPPING), [SetAlarm(CLEANING)]


def _host_ended(state: State, event: Event) -> Step:
    assert isinstance(event, Ended)
    # A host may well have nothing left to do while others still run; but if it owes the end of a
    # worker, somebody else stopped the job there.
    if any(worker.host == event.host for worker in state.awaited):
        state = replace(state, outcome=Outcome.HOST_FAILED)
        return _stop(_gone(state, event), min(state.grace, FAILURE_GRACE))
    return _gone(state, event), []


def _host_lost(state: State, event: Event) -> Step:
    assert isinstance(event, Lost | Refused)
    state = replace(_mark(state, event.host, HostState.LOST), outcome=Outcome.HOST_FAILED)
    return _stop(state, min(state.grace, FAILURE_GRACE))


def _broken_early(state: State, event: Event) -> Step:
    return _abort(replace(state, outcome=Outcome.HOST_FAILED))


def _broken(state: State, event: Event) -> Step:
    return _stop(replace(state, outcome=Outcome.HOST_FAILED), min(state.grace, FAILURE_GRACE))


def _hung(state: State, event: Event) -> Step:
    # Waiting processes react to nothing: they have said where they wait, and TERM says no more.
    return _stop(replace(state, outcome=Outcome.WORKER_FAILED), 0.0)


def _interrupted(state: State, event: Event) -> Step:
    return _stop(replace(state, outcome=Outcome.INTERRUPTED), state.grace)


def _stop(state: State, grace: float) -> Step:
    state = _end_if_clean(replace(state, phase=Phase.STOPPING))
    return state, [
        *(Stop(host, grace) for host in _running(state)),
        *_alarm(state, grace + CLEANING),
    ]


def _one_less(state: State, event: Event) -> Step:
    assert isinstance(event, Refused | Ended | Lost)
    return _end_if_clean(_gone(state, event)), []


def _force(state: State, event: Event) -> Step:
    state = replace(state, phase=Phase.KILLING)
    return state, [*(Kill(host) for host in _running(state)), SetAlarm(CLEANING)]


def _leave(state: State, event: Event) -> Step:
    lost = {
        host: HostState.CLEAN if now is HostState.CLEAN else HostState.LOST
        for host, now in state.hosts.items()
    }
    return replace(state, phase=Phase.ENDED, hosts=lost), []


def _mark(state: State, host: str, now: HostState) -> State:
    return replace(state, hosts={**state.hosts, host: now})


def _gone(state: State, event: Refused | Ended | Lost) -> State:
    lost = isinstance(event, Lost)
    return _mark(state, event.host, HostState.LOST if lost else HostState.CLEAN)


def _running(state: State) -> list[str]:
    return [
        host for host, now in state.hosts.items() if now not in (HostState.CLEAN, HostState.LOST)
    ]


def _end_if_clean(state: State) -> State:
    return state if _running(state) else replace(state, phase=Phase.ENDED)


def _alarm(state: State, seconds: float) -> list[Action]:
    return [] if state.phase is Phase.ENDED else [SetAlarm(seconds)]


TABLE: dict[tuple[Phase, type[Event]], Callable[[State, Event], Step]] = {
    (Phase.PREPARING, Prepared): _host_ready,
    (Phase.PREPARING, Refused): _cannot_start,
    (Phase.PREPARING, Exited): _ignore,
    (Phase.PREPARING, Ended): _cannot_start,
    (Phase.PREPARING, Lost): _cannot_start,
    (Phase.PREPARING, Interrupted): _interrupted_early,
    (Phase.PREPARING, Hung): _ignore,
    (Phase.PREPARING, Broken): _broken_early,
    (Phase.PREPARING, Alarm): _ignore,
    (Phase.GIVING_UP, Prepared): _host_ready_in_vain,
    (Phase.GIVING_UP, Refused): _cannot_start,
    (Phase.GIVING_UP, Exited): _ignore,
    (Phase.GIVING_UP, Ended): _cannot_start,
    (Phase.GIVING_UP, Lost): _cannot_start,
    (Phase.GIVING_UP, Interrupted): _interrupted_early,
    (Phase.GIVING_UP, Hung): _ignore,
    (Phase.GIVING_UP, Broken): _broken_early,
    (Phase.GIVING_UP, Alarm): _give_up,
    (Phase.RUNNING, Prepared): _ignore,
    (Phase.RUNNING, Refused): _host_lost,
    (Phase.RUNNING, Exited): _worker_exited,
    (Phase.RUNNING, Ended): _host_ended,
    (Phase.RUNNING, Lost): _host_lost,
    (Phase.RUNNING, Interrupted): _interrupted,
    (Phase.RUNNING, Hung): _hung,
    (Phase.RUNNING, Broken): _broken,
    (Phase.RUNNING, Alarm): _ignore,
    (Phase.STOPPING, Prepared): _too_late_to_be_ready,
    (Phase.STOPPING, Refused): _one_less,
    (Phase.STOPPING, Exited): _ignore,
    (Phase.STOPPING, Ended): _one_less,
    (Phase.STOPPING, Lost): _one_less,
    (Phase.STOPPING, Interrupted): _force,
    (Phase.STOPPING, Hung): _ignore,
    (Phase.STOPPING, Broken): _ignore,
    (Phase.STOPPING, Alarm): _force,
    (Phase.KILLING, Prepared): _too_late_to_be_ready,
    (Phase.KILLING, Refused): _one_less,
    (Phase.KILLING, Exited): _ignore,
    (Phase.KILLING, Ended): _one_less,
    (Phase.KILLING, Lost): _one_less,
    (Phase.KILLING, Interrupted): _leave,
    (Phase.KILLING, Hung): _ignore,
    (Phase.KILLING, Broken): _ignore,
    (Phase.KILLING, Alarm): _leave,
    (Phase.ENDED, Prepared): _ignore,
    (Phase.ENDED, Refused): _ignore,
    (Phase.ENDED, Exited): _ignore,
    (Phase.ENDED, Ended): _ignore,
    (Phase.ENDED, Lost): _ignore,
    (Phase.ENDED, Interrupted): _ignore,
    (Phase.ENDED, Hung): _ignore,
    (Phase.ENDED, Broken): _ignore,
    (Phase.ENDED, Alarm): _ignore,
}
