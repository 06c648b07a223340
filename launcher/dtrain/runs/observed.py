"""The state of a run, from its events in the order of time. Pure.

The views and the launchers of a run read it. `dtrain.runs.attempt_events` reads the same events for
where the time went.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace

from dtrain.failures.cause import Report
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.records import dataclass
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.progress import Progress
from dtrain.runs.restart import AttemptResult


@dataclass(slots=True)
class ObservedAttempt:
    """What is known of the latest attempt. Times are those that `ObservedRun.add` gets."""

    number: int = 1
    began: float | None = None
    allocated: tuple[str, ...] = ()
    """The hosts that an engine chose; empty if none did."""
    hosts: dict[str, tuple[float, events.HostState]] = field(default_factory=dict)
    """The last state of each host, with the time since when."""
    findings: events.Findings | None = None
    tensorboards: dict[str, events.TensorBoardAddress] = field(default_factory=dict)
    """By host."""
    progress: tuple[Progress, ...] = ()
    """The last two reports of the process that represents the job. Two give a rate."""
    slow: Straggler | None = None
    """The ranks that are slow now."""
    stalled: float = 0.0
    """When `stall` was found."""
    stall: Stall | None = None
    """What stands still now, with the seconds at `stalled`."""
    stop_reason: str = ""
    """Why it was stopped; empty if it was not."""
    reported: list[tuple[float, events.HostEvent]] = field(default_factory=list)
    """The events of the hosts, each with the time at which it arrived."""

    def stall_at(self, now: float) -> Stall | None:
        """What stands still, with the seconds until ``now``."""
        if self.stall is None:
            return None
        return replace(self.stall, seconds=self.stall.seconds + max(0.0, now - self.stalled))


@dataclass(slots=True)
class ObservedRun:
    attempt: ObservedAttempt = field(default_factory=ObservedAttempt)
    results: dict[int, AttemptResult] = field(default_factory=dict)
    """How earlier attempts ended."""
    failure: Report | None = None
    """The failure of the last attempt that another one followed."""
    notified: set[events.Notified] = field(default_factory=set)
    """The notifications that a launcher has sent, or was about to send."""
    report: Report | None = None
    """How the run ended; None until it has."""
    ended: float | None = None
    """When it ended."""
    latest: float | None = None
    """The latest time of an event. Not of the last event: a clock can be set back."""

    def until(self, now: float, *, attended: bool) -> float:
        """Until when the run is known: until its end, or ``now``. Without a launcher, nobody knows
        what happened to it after its last event."""
        if self.ended is not None:
            return self.ended
        if self.latest is None:
            return now
        # The time of day may have been set back since the last event.
        return max(now, self.latest) if attended else min(now, self.latest)

    @classmethod
    def of(cls, records: Iterable[tuple[float, events.RunEvent]]) -> ObservedRun:
        """The state after all events of a journal."""
        state = cls()
        for then, event in records:
            state.add(then, event)
        return state

    @classmethod
    def read(cls, folder: RunFolder) -> ObservedRun:
        """Raises UsageError as `JournalReader.read` does."""
        return cls.of(JournalReader(folder.journal).read())

    def add(self, then: float, event: events.RunEvent) -> None:
        """``then``: when ``event`` happened, on any clock that all events of the run share."""
        now = self.attempt
        self.latest = then if self.latest is None else max(self.latest, then)
        match event:
            case events.RunStarted():
                now.began = then
            case events.NextAttempt(number):
                self.attempt = ObservedAttempt(number, then)
            case events.AttemptPlanned(plan):
                self.attempt = ObservedAttempt(plan.attempt, then)
            case events.HostsAllocated(hosts):
                now.allocated = hosts
                now.hosts.clear()  # of hosts that had only numbers
            case events.HostsPlanned():
                now.hosts.clear()
            case events.RunAttached(plan=plan) if plan.attempt != now.number:
                self.attempt = ObservedAttempt(plan.attempt, then)
            case events.LauncherAttached() | events.RunAttached():
                # The new launcher reports them again, if they are still so.
                now.slow = now.stall = None
                now.tensorboards.clear()
            case events.HostState(host):
                now.hosts[host] = then, event
            case events.Findings():
                now.findings = event
            case events.TensorBoardAddress(host):
                now.tensorboards[host] = event
            case events.Progressed(report):
                now.progress = (*now.progress[-1:], report)
            case events.StragglersChanged(slow):
                now.slow = slow
            case events.StallChanged(stall):
                now.stall, now.stalled = stall, then
            case events.StopRequested(why):
                now.stop_reason = why
            case events.HostEvent():
                now.reported.append((then, event))
            case events.AttemptFailed(number, result, failure):
                self.results[number], self.failure = result, failure
            case events.Notified():
                self.notified.add(event)
            case events.Cleaned(problems, hint) if self.report and problems is not None:
                self.report = replace(self.report, problems=problems, hint=hint)
            case events.Finished(ended):
                self.report, self.ended = ended, then
                now.slow = now.stall = None  # nothing runs any more
