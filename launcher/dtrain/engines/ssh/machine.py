"""One attempt as a state machine in a table.

Theory of operation
-------------------
All hosts are prepared before any host starts (``PREPARING``). Once the last host is ready, all
start together (``RUNNING``). If one cannot start, the other hosts get a few seconds to report
their own problems (``GIVING_UP``). Then all hosts undo their preparation.

The first ``AttemptOutcome`` stays: every worker finished, a worker failed, a host failed, or the
user stopped it. A host that is lost after all of its workers have finished does not fail the job.
If a service fails, the workers have some seconds to finish before that fails the job.
From the outcome on, the goal is that nothing is left running (``STOPPING``): each host gets a stop
command, and reports when it is clean. A second stop request, or a host that takes too long, turns
the request into a kill (``KILLING``). Hosts that still do not answer are given up, and the report
names them. When every host is clean or given up, the attempt has ``ENDED``. The launcher can leave
at any time (``DETACHED``) and then decides nothing more. It also leaves a running job whose hosts
it cannot reach any more, if it reaches no other host either: its own network may be gone.

`step` is pure: it takes a state and an event, and returns the new state and the actions to carry
out. Times are in seconds. It reads no clock; it requests an alarm instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from dtrain.records import dataclass

COLLECT_PROBLEMS = 3.0
"""Seconds in which other hosts can report their problems once one cannot start."""
FAILURE_GRACE = 3.0
"""Maximum seconds between TERM and KILL after a failure: peers of a dead worker only hang, and
their GPUs are needed."""
SERVICE_SECONDS = 5.0
"""Seconds that the job has to finish once a service has failed: it may have failed because the
others are done."""
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
    service_failed: bool = False

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

    kill: bool = False
    """Whether workers get KILL without TERM; a later request kills them anyway."""


@dataclass(frozen=True, slots=True)
class Detached:
    """The launcher leaves, and the job continues."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """The launcher reaches no host any more, and cannot know how the job goes on."""


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
    | CutOff
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


def attached(state: AttemptState) -> AttemptState:
    """``state``, of `begin`, for a run that was started before. Its hosts report what has happened
    since."""
    running = dict.fromkeys(state.hosts, HostCondition.RUNNING)
    return replace(state, phase=AttemptPhase.RUNNING, hosts=running, started=True)


def step(state: AttemptState, event: AttemptEvent) -> _Step:
    """Return the state after ``event`` and the actions to carry out, in order."""
    return TABLE[type(event)][_COLUMN[state.phase]](state, event)


# Transitions ----------------------------------------------------------------------------------


def _ignore(state: AttemptState, event: Any) -> _Step:
    return state, []


def _host_ready(state: AttemptState, event: HostReady) -> _Step:
    state = _mark(state, event.host, HostCondition.READY)
    if any(host is not HostCondition.READY for host in state.hosts.values()):
        return state, []
    started = dict.fromkeys(state.hosts, HostCondition.RUNNING)
    return replace(state, phase=AttemptPhase.RUNNING, hosts=started, started=True), [
        StartHost(host) for host in started
    ]


def _ready_after_failure(state: AttemptState, event: HostReady) -> _Step:
    return _abort_if_all_answered(_mark(state, event.host, HostCondition.READY))


def _ready_too_late(state: AttemptState, event: HostReady) -> _Step:
    return state, [AbortHost(event.host)]


def _cannot_start(state: AttemptState, event: HostRefused | HostEnded | HostLost) -> _Step:
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


def _give_up(state: AttemptState, event: Alarm) -> _Step:
    return _abort(state)


def _interrupted_early(state: AttemptState, event: Interrupted) -> _Step:
    return _abort(replace(state, outcome=state.outcome or AttemptOutcome.INTERRUPTED))


def _worker_exited(state: AttemptState, event: WorkerExited) -> _Step:
    service = event.worker in state.services.get(event.worker.host, ())
    if event.failed and not service:
        return _stop_soon(state, AttemptOutcome.WORKER_FAILED)
    awaited = _without(state.awaited, event.worker)
    services = _without(state.services, event.worker)
    first = event.failed and not state.service_failed
    failed = state.service_failed or event.failed
    state = replace(state, awaited=awaited, services=services, service_failed=failed)
    if first:
        return state, [SetAlarm(SERVICE_SECONDS)]
    if awaited:
        return state, []
    if services:
        return _stop_soon(state, AttemptOutcome.DONE)
    # Each host ends by itself once its processes have; the alarm catches a host that does not.
    done = replace(state, phase=AttemptPhase.STOPPING, outcome=AttemptOutcome.DONE)
    return done, [SetAlarm(CLEANING)]


def _service_failed(state: AttemptState, event: Alarm) -> _Step:
    if not state.service_failed:
        return state, []
    return _stop_soon(state, AttemptOutcome.WORKER_FAILED)


def _host_ended(state: AttemptState, event: HostEnded) -> _Step:
    return _without_host(_mark_over(state, event), event.host)


def _host_lost(state: AttemptState, event: HostLost | HostRefused) -> _Step:
    return _without_host(_mark(state, event.host, HostCondition.LOST), event.host)


def _without_host(state: AttemptState, host: str) -> _Step:
    # If its processes have ended, the others do not need it. If not, it was lost with them, or
    # something outside this launcher stopped the job there.
    if state.has_finished(host):
        return state, []
    return _stop_soon(state, AttemptOutcome.HOST_FAILED)


def _broken_early(state: AttemptState, event: LauncherFailed) -> _Step:
    return _abort(replace(state, outcome=AttemptOutcome.HOST_FAILED))


def _broken(state: AttemptState, event: LauncherFailed) -> _Step:
    return _stop_soon(state, AttemptOutcome.HOST_FAILED)


def _hung(state: AttemptState, event: Hung) -> _Step:
    # Hung processes ignore TERM, and their stacks are already collected.
    return _stop(replace(state, outcome=AttemptOutcome.WORKER_FAILED), 0.0)


def _interrupted(state: AttemptState, event: Interrupted) -> _Step:
    state = replace(state, outcome=AttemptOutcome.INTERRUPTED)
    return _stop(state, 0.0, AttemptPhase.KILLING) if event.kill else _stop(state, state.grace)


def _stop_soon(state: AttemptState, outcome: AttemptOutcome) -> _Step:
    """Stop workers that can only wait. The whole grace period is for a stop by the user."""
    return _stop(replace(state, outcome=outcome), min(state.grace, FAILURE_GRACE))


def _stop(state: AttemptState, grace: float, phase: AttemptPhase = AttemptPhase.STOPPING) -> _Step:
    state = _end_if_clean(replace(state, phase=phase))
    return state, [
        *(StopHost(host, grace) for host in state.running),
        *_alarm(state, grace + CLEANING),
    ]


def _host_over(state: AttemptState, event: HostRefused | HostEnded | HostLost) -> _Step:
    return _end_if_clean(_mark_over(state, event)), []


def _force(state: AttemptState, event: Interrupted | Alarm) -> _Step:
    state = replace(state, phase=AttemptPhase.KILLING)
    return state, [*(KillHost(host) for host in state.running), SetAlarm(CLEANING)]


def _give_up_hosts(state: AttemptState, event: Interrupted | Alarm) -> _Step:
    lost = {
        host: HostCondition.CLEAN if now is HostCondition.CLEAN else HostCondition.LOST
        for host, now in state.hosts.items()
    }
    return replace(state, phase=AttemptPhase.ENDED, hosts=lost), []


def _detach(state: AttemptState, event: Detached | CutOff) -> _Step:
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


_Row = tuple[Callable[[AttemptState, Any], _Step], ...]
_COLUMN = {phase: number for number, phase in enumerate(AttemptPhase)}
# fmt: off
TABLE: dict[type[AttemptEvent], _Row] = {
    # PREPARING GIVING_UP RUNNING STOPPING KILLING ENDED DETACHED
    HostReady: (
        _host_ready, _ready_after_failure, _ignore, _ready_too_late, _ready_too_late, _ignore,
        _ignore),
    HostRefused: (
        _cannot_start, _cannot_start, _host_lost, _host_over, _host_over, _ignore, _ignore),
    WorkerExited: (
        _ignore, _ignore, _worker_exited, _ignore, _ignore, _ignore, _ignore),
    HostEnded: (
        _cannot_start, _cannot_start, _host_ended, _host_over, _host_over, _ignore, _ignore),
    HostLost: (
        _cannot_start, _cannot_start, _host_lost, _host_over, _host_over, _ignore, _ignore),
    Interrupted: (
        _interrupted_early, _interrupted_early, _interrupted, _force, _give_up_hosts, _ignore,
        _ignore),
    Detached: (
        _detach, _detach, _detach, _detach, _detach, _detach, _ignore),
    CutOff: (
        _ignore, _ignore, _detach, _ignore, _ignore, _ignore, _ignore),
    Hung: (
        _ignore, _ignore, _hung, _ignore, _ignore, _ignore, _ignore),
    LauncherFailed: (
        _broken_early, _broken_early, _broken, _ignore, _ignore, _ignore, _ignore),
    Alarm: (
        _ignore, _give_up, _service_failed, _force, _give_up_hosts, _ignore, _ignore),
}
# fmt: on
