"""One attempt as a state machine in a table.

Theory of operation
-------------------
All hosts are prepared before any host starts (``PREPARING``). Once the last host is ready, all
start together (``RUNNING``). If one cannot start, the other hosts get a few seconds to report
their own problems (``GIVING_UP``). Then all hosts undo their preparation.

The first ``AttemptOutcome`` stays: every worker finished, a worker failed, a host failed, or the
user stopped it. A host that is lost after all of its workers have finished does not fail the job.
From the outcome on, the goal is that nothing is left running (``STOPPING``): each host gets a stop
command, and reports when it is clean. A second stop request, or a host that takes too long, turns
the request into a kill (``KILLING``). Hosts that still do not answer are given up, and the report
names them. When every host is clean or given up, the attempt has ``ENDED``. The launcher can leave
at any time (``DETACHED``) and then decides nothing more.

`step` is pure: it takes a state and an event, and returns the new state and the actions to carry
out. Times are in seconds. It reads no clock; it requests an alarm instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

COLLECT_PROBLEMS = 3.0
"""Seconds in which other hosts can report their problems once one cannot start."""
FAILURE_GRACE = 3.0
"""Maximum seconds between TERM and KILL after a failure: peers of a dead worker only hang, and
their GPUs are needed."""
CLEANING = 10.0
"""Seconds after the grace period in which a host should report that it is clean."""


class AttemptPhase(Enum):
    PREPARING = auto()
    GIVING_UP = auto()
    RUNNING = auto()
    STOPPING = auto()
    KILLING = auto()
    ENDED = auto()
    DETACHED = auto()


class AttemptOutcome(Enum):
    """Why an attempt ended."""

    DONE = auto()
    WORKER_FAILED = auto()
    HOST_FAILED = auto()
    INTERRUPTED = auto()


class HostCondition(Enum):
    PREPARING = auto()
    READY = auto()
    RUNNING = auto()
    CLEAN = auto()
    """No process of the run is left: it ended, was refused, or never started."""
    LOST = auto()
    """Unknown: the host cannot be reached or did not answer."""


@dataclass(frozen=True, slots=True)
class WorkerId:
    """Identifies a process of the plan."""

    host: str
    role: str
    index: int


Workers = dict[str, frozenset[WorkerId]]
"""The processes of each host that have not ended; only hosts that have some. By host, because a
change copies it: thousands of ranks are on hundreds of hosts."""


@dataclass(frozen=True, slots=True)
class AttemptState:
    phase: AttemptPhase
    hosts: dict[str, HostCondition]
    awaited: Workers
    """Processes that the run waits for: all except services."""
    services: Workers
    grace: float
    """Seconds between TERM and KILL when the user stops the job."""
    outcome: AttemptOutcome | None = None
    started: bool = False
    """Whether the workers have started."""

    @property
    def running(self) -> list[str]:
        """The hosts that may still run processes of the job."""
        over = (HostCondition.CLEAN, HostCondition.LOST)
        return [host for host, now in self.hosts.items() if now not in over]

    def has_finished(self, host: str) -> bool:
        """Whether all processes of the host, services included, ended before the attempt got an
        outcome."""
        return host not in self.awaited and host not in self.services


# Events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostReady:
    host: str


@dataclass(frozen=True, slots=True)
class HostRefused:
    """A host cannot be reached or prepared. No process of the run is left there."""

    host: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    worker: WorkerId
    failed: bool


@dataclass(frozen=True, slots=True)
class HostEnded:
    """A host reports that no process of the run is left there."""

    host: str


@dataclass(frozen=True, slots=True)
class HostLost:
    """A running host can no longer be reached, or cannot report how it ended."""

    host: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user or the system requests a stop."""


@dataclass(frozen=True, slots=True)
class Detached:
    """The launcher leaves, and the job continues."""


@dataclass(frozen=True, slots=True)
class Hung:
    """The job has made no progress for longer than the limit."""


@dataclass(frozen=True, slots=True)
class LauncherFailed:
    """The launching machine cannot continue, for example because its disk is full."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """The alarm has expired."""


AttemptEvent = (
    HostReady
    | HostRefused
    | WorkerExited
    | HostEnded
    | HostLost
    | Interrupted
    | Detached
    | Hung
    | LauncherFailed
    | Alarm
)


# Actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartHost:
    host: str


@dataclass(frozen=True, slots=True)
class AbortHost:
    """Undo the preparation of a host; it answers with `HostEnded`."""

    host: str


@dataclass(frozen=True, slots=True)
class StopHost:
    host: str
    grace: float


@dataclass(frozen=True, slots=True)
class KillHost:
    host: str


@dataclass(frozen=True, slots=True)
class SetAlarm:
    """Send ``Alarm`` in ``seconds``. A later alarm replaces an earlier one."""

    seconds: float


AttemptAction = StartHost | AbortHost | StopHost | KillHost | SetAlarm
_Step = tuple[AttemptState, list[AttemptAction]]


def begin(
    hosts: list[str], awaited: list[WorkerId], services: list[WorkerId], *, grace: float
) -> AttemptState:
    """The initial state. ``hosts`` is in node-rank order."""
    return AttemptState(
        phase=AttemptPhase.PREPARING,
        hosts=dict.fromkeys(hosts, HostCondition.PREPARING),
        awaited=_by_host(awaited),
        services=_by_host(services),
        grace=grace,
    )


def attached(
    hosts: list[str], awaited: list[WorkerId], services: list[WorkerId], *, grace: float
) -> AttemptState:
    """The state of a run that was started before. Its hosts report what has happened since."""
    state = begin(hosts, awaited, services, grace=grace)
    running = dict.fromkeys(hosts, HostCondition.RUNNING)
    return replace(state, phase=AttemptPhase.RUNNING, hosts=running, started=True)


def step(state: AttemptState, event: AttemptEvent) -> _Step:
    """Return the state after ``event`` and the actions to carry out, in order."""
    return TABLE[state.phase, type(event)](state, event)


# Transitions ----------------------------------------------------------------------------------


def _ignore(state: AttemptState, event: AttemptEvent) -> _Step:
    return state, []


def _host_ready(state: AttemptState, event: AttemptEvent) -> _Step:
    assert isinstance(event, HostReady)
    state = _mark(state, event.host, HostCondition.READY)
    if any(host is not HostCondition.READY for host in state.hosts.values()):
        return state, []
    started = dict.fromkeys(state.hosts, HostCondition.RUNNING)
    return replace(state, phase=AttemptPhase.RUNNING, hosts=started, started=True), [
        StartHost(host) for host in started
    ]


def _ready_after_failure(state: AttemptState, event: AttemptEvent) -> _Step:
    assert isinstance(event, HostReady)
    return _abort_if_all_answered(_mark(state, event.host, HostCondition.READY))


def _ready_too_late(state: AttemptState, event: AttemptEvent) -> _Step:
    assert isinstance(event, HostReady)
    return state, [AbortHost(event.host)]


def _cannot_start(state: AttemptState, event: AttemptEvent) -> _Step:
    assert isinstance(event, HostRefused | HostEnded | HostLost)
    first = state.phase is AttemptPhase.PREPARING
    state = replace(
        _mark_over(state, event), phase=AttemptPhase.GIVING_UP, outcome=AttemptOutcome.HOST_FAILED
    )
    state, actions = _abort_if_all_answered(state)
    if first and state.phase is AttemptPhase.GIVING_UP:
        actions = [*actions, SetAlarm(COLLECT_PROBLEMS)]
    return state, actions


def _abort_if_all_answered(state: AttemptState) -> _Step:
    if HostCondition.PREPARING in state.hosts.values():
        return state, []
    return _abort(state)


def _abort(state: AttemptState) -> _Step:
    waiting = [
        host
        for host, now in state.hosts.items()
        if now in (HostCondition.PREPARING, HostCondition.READY)
    ]
    state = _end_if_clean(replace(state, phase=AttemptPhase.STOPPING))
    return state, [*(AbortHost(host) for host in waiting), *_alarm(state, CLEANING)]


def _give_up(state: AttemptState, event: AttemptEvent) -> _Step:
    return _abort(state)


def _interrupted_early(state: AttemptState, event: AttemptEvent) -> _Step:
    return _abort(replace(state, outcome=state.outcome or AttemptOutcome.INTERRUPTED))


def _worker_exited(state: AttemptState, event: AttemptEvent) -> _Step:
    assert isinstance(event, WorkerExited)
    if event.failed:
        grace = min(state.grace, FAILURE_GRACE)
        return _stop(replace(state, outcome=AttemptOutcome.WORKER_FAILED), grace)
    awaited = _without(state.awaited, event.worker)
    services = _without(state.services, event.worker)
    state = replace(state, awaited=awaited, services=services)
    if awaited:
        return state, []
    state = replace(state, outcome=AttemptOutcome.DONE)
    if services:
        return _stop(state, min(state.grace, FAILURE_GRACE))
    # Each host ends by itself once its processes have; the alarm catches a host that does not.
    return replace(state, phase=AttemptPhase.STOPPING), [SetAlarm(CLEANING)]


def _host_ended(state: AttemptState, event: AttemptEvent) -> _Step:
    assert isinstance(event, HostEnded)
    return _without_host(_mark_over(state, event), event.host)


def _host_lost(state: AttemptState, event: AttemptEvent) -> _Step:
    assert isinstance(event, HostLost | HostRefused)
    return _without_host(_mark(state, event.host, HostCondition.LOST), event.host)


def _without_host(state: AttemptState, host: str) -> _Step:
    # If its processes have ended, the others do not need it. If not, it was lost with them, or
    # something outside this launcher stopped the job there.
    if state.has_finished(host):
        return state, []
    state = replace(state, outcome=AttemptOutcome.HOST_FAILED)
    return _stop(state, min(state.grace, FAILURE_GRACE))


def _broken_early(state: AttemptState, event: AttemptEvent) -> _Step:
    return _abort(replace(state, outcome=AttemptOutcome.HOST_FAILED))


def _broken(state: AttemptState, event: AttemptEvent) -> _Step:
    return _stop(
        replace(state, outcome=AttemptOutcome.HOST_FAILED), min(state.grace, FAILURE_GRACE)
    )


def _hung(state: AttemptState, event: AttemptEvent) -> _Step:
    # Hung processes ignore TERM, and their stacks are already collected.
    return _stop(replace(state, outcome=AttemptOutcome.WORKER_FAILED), 0.0)


def _interrupted(state: AttemptState, event: AttemptEvent) -> _Step:
    return _stop(replace(state, outcome=AttemptOutcome.INTERRUPTED), state.grace)


def _stop(state: AttemptState, grace: float) -> _Step:
    state = _end_if_clean(replace(state, phase=AttemptPhase.STOPPING))
    return state, [
        *(StopHost(host, grace) for host in state.running),
        *_alarm(state, grace + CLEANING),
    ]


def _host_over(state: AttemptState, event: AttemptEvent) -> _Step:
    assert isinstance(event, HostRefused | HostEnded | HostLost)
    return _end_if_clean(_mark_over(state, event)), []


def _force(state: AttemptState, event: AttemptEvent) -> _Step:
    state = replace(state, phase=AttemptPhase.KILLING)
    return state, [*(KillHost(host) for host in state.running), SetAlarm(CLEANING)]


def _give_up_hosts(state: AttemptState, event: AttemptEvent) -> _Step:
    lost = {
        host: HostCondition.CLEAN if now is HostCondition.CLEAN else HostCondition.LOST
        for host, now in state.hosts.items()
    }
    return replace(state, phase=AttemptPhase.ENDED, hosts=lost), []


def _detach(state: AttemptState, event: AttemptEvent) -> _Step:
    return replace(state, phase=AttemptPhase.DETACHED), []


def _by_host(workers: list[WorkerId]) -> Workers:
    found: dict[str, list[WorkerId]] = {}
    for worker in workers:
        found.setdefault(worker.host, []).append(worker)
    return {host: frozenset(its) for host, its in found.items()}


def _without(workers: Workers, ended: WorkerId) -> Workers:
    if ended.host not in workers:
        return workers
    others = workers | {ended.host: workers[ended.host] - {ended}}
    if not others[ended.host]:
        del others[ended.host]
    return others


def _mark(state: AttemptState, host: str, now: HostCondition) -> AttemptState:
    return replace(state, hosts={**state.hosts, host: now})


def _mark_over(state: AttemptState, event: HostRefused | HostEnded | HostLost) -> AttemptState:
    lost = isinstance(event, HostLost)
    return _mark(state, event.host, HostCondition.LOST if lost else HostCondition.CLEAN)


def _end_if_clean(state: AttemptState) -> AttemptState:
    return state if state.running else replace(state, phase=AttemptPhase.ENDED)


def _alarm(state: AttemptState, seconds: float) -> list[AttemptAction]:
    return [] if state.phase is AttemptPhase.ENDED else [SetAlarm(seconds)]


TABLE: dict[
    tuple[AttemptPhase, type[AttemptEvent]], Callable[[AttemptState, AttemptEvent], _Step]
] = {
    (AttemptPhase.PREPARING, HostReady): _host_ready,
    (AttemptPhase.PREPARING, HostRefused): _cannot_start,
    (AttemptPhase.PREPARING, WorkerExited): _ignore,
    (AttemptPhase.PREPARING, HostEnded): _cannot_start,
    (AttemptPhase.PREPARING, HostLost): _cannot_start,
    (AttemptPhase.PREPARING, Interrupted): _interrupted_early,
    (AttemptPhase.PREPARING, Detached): _detach,
    (AttemptPhase.PREPARING, Hung): _ignore,
    (AttemptPhase.PREPARING, LauncherFailed): _broken_early,
    (AttemptPhase.PREPARING, Alarm): _ignore,
    (AttemptPhase.GIVING_UP, HostReady): _ready_after_failure,
    (AttemptPhase.GIVING_UP, HostRefused): _cannot_start,
    (AttemptPhase.GIVING_UP, WorkerExited): _ignore,
    (AttemptPhase.GIVING_UP, HostEnded): _cannot_start,
    (AttemptPhase.GIVING_UP, HostLost): _cannot_start,
    (AttemptPhase.GIVING_UP, Interrupted): _interrupted_early,
    (AttemptPhase.GIVING_UP, Detached): _detach,
    (AttemptPhase.GIVING_UP, Hung): _ignore,
    (AttemptPhase.GIVING_UP, LauncherFailed): _broken_early,
    (AttemptPhase.GIVING_UP, Alarm): _give_up,
    (AttemptPhase.RUNNING, HostReady): _ignore,
    (AttemptPhase.RUNNING, HostRefused): _host_lost,
    (AttemptPhase.RUNNING, WorkerExited): _worker_exited,
    (AttemptPhase.RUNNING, HostEnded): _host_ended,
    (AttemptPhase.RUNNING, HostLost): _host_lost,
    (AttemptPhase.RUNNING, Interrupted): _interrupted,
    (AttemptPhase.RUNNING, Detached): _detach,
    (AttemptPhase.RUNNING, Hung): _hung,
    (AttemptPhase.RUNNING, LauncherFailed): _broken,
    (AttemptPhase.RUNNING, Alarm): _ignore,
    (AttemptPhase.STOPPING, HostReady): _ready_too_late,
    (AttemptPhase.STOPPING, HostRefused): _host_over,
    (AttemptPhase.STOPPING, WorkerExited): _ignore,
    (AttemptPhase.STOPPING, HostEnded): _host_over,
    (AttemptPhase.STOPPING, HostLost): _host_over,
    (AttemptPhase.STOPPING, Interrupted): _force,
    (AttemptPhase.STOPPING, Detached): _detach,
    (AttemptPhase.STOPPING, Hung): _ignore,
    (AttemptPhase.STOPPING, LauncherFailed): _ignore,
    (AttemptPhase.STOPPING, Alarm): _force,
    (AttemptPhase.KILLING, HostReady): _ready_too_late,
    (AttemptPhase.KILLING, HostRefused): _host_over,
    (AttemptPhase.KILLING, WorkerExited): _ignore,
    (AttemptPhase.KILLING, HostEnded): _host_over,
    (AttemptPhase.KILLING, HostLost): _host_over,
    (AttemptPhase.KILLING, Interrupted): _give_up_hosts,
    (AttemptPhase.KILLING, Detached): _detach,
    (AttemptPhase.KILLING, Hung): _ignore,
    (AttemptPhase.KILLING, LauncherFailed): _ignore,
    (AttemptPhase.KILLING, Alarm): _give_up_hosts,
    (AttemptPhase.ENDED, HostReady): _ignore,
    (AttemptPhase.ENDED, HostRefused): _ignore,
    (AttemptPhase.ENDED, WorkerExited): _ignore,
    (AttemptPhase.ENDED, HostEnded): _ignore,
    (AttemptPhase.ENDED, HostLost): _ignore,
    (AttemptPhase.ENDED, Interrupted): _ignore,
    (AttemptPhase.ENDED, Detached): _detach,
    (AttemptPhase.ENDED, Hung): _ignore,
    (AttemptPhase.ENDED, LauncherFailed): _ignore,
    (AttemptPhase.ENDED, Alarm): _ignore,
    (AttemptPhase.DETACHED, HostReady): _ignore,
    (AttemptPhase.DETACHED, HostRefused): _ignore,
    (AttemptPhase.DETACHED, WorkerExited): _ignore,
    (AttemptPhase.DETACHED, HostEnded): _ignore,
    (AttemptPhase.DETACHED, HostLost): _ignore,
    (AttemptPhase.DETACHED, Interrupted): _ignore,
    (AttemptPhase.DETACHED, Detached): _ignore,
    (AttemptPhase.DETACHED, Hung): _ignore,
    (AttemptPhase.DETACHED, LauncherFailed): _ignore,
    (AttemptPhase.DETACHED, Alarm): _ignore,
}
