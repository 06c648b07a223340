"""What the journal says about each attempt of a run, for `dtrain.runs.goodput`. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from itertools import chain

from dtrain.failures.cause import Report
from dtrain.records import dataclass
from dtrain.runs import events
from dtrain.runs.clocks import HostClock
from dtrain.runs.events import JournalEvent
from dtrain.runs.shown_state import ShownState

Records = Iterable[tuple[float, JournalEvent]]
"""Events of a journal with their times in seconds since the epoch, in the journal's order."""

ProgressPoint = tuple[float, int, Mapping[str, float] | None]
"""A report: its time, the steps done, and the phases, if it has them."""


@dataclass(slots=True)
class _Reports:
    """The reports that carry one clock of a host."""

    clock: HostClock = field(default_factory=HostClock)
    points: list[ProgressPoint] = field(default_factory=list)


@dataclass(slots=True)
class AttemptEvents:
    """What the journal says about one attempt; times in seconds since the epoch."""

    number: int
    begin: float
    end: float = math.inf
    """When the next attempt begins, or the run ends."""
    reports: dict[tuple[str, bool], list[_Reports]] = field(default_factory=dict)
    """By `Progress.source`: their clocks may differ. More than one if the clock was set."""
    hung: list[tuple[float, float]] = field(default_factory=list)
    apart: dict[str, float] = field(default_factory=dict)
    """Hosts that cannot be reached, each with the time since when."""
    queued: float | None = None
    waits: list[tuple[float, float]] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    """When the workers of each host started. A host that is reached again runs again."""
    stopped: float = math.inf
    """When its work ended: the first failure, or a stop request."""
    failed: float = math.inf
    """When the attempt was over and its successor was decided."""
    why: str = ""
    ok: bool | None = None

    @property
    def points(self) -> list[ProgressPoint]:
        """The reports, on the launcher's clock."""
        return [
            (at + reports.clock.offset, step, phases)
            for reports in chain(*self.reports.values())
            for at, step, phases in reports.points
        ]

    def add(self, then: float, event: JournalEvent) -> None:
        match event:
            case events.Progressed(report):
                self._point(report.source, then, report.time, report.step, None)
            case events.PhasesSpent(at, step, seconds, process):
                self._point((process, False), then, at, step, seconds)
            case events.StallChanged(found):
                self.hung = [(begin, min(until, then)) for begin, until in self.hung]
                if found is not None:
                    self.hung.append((then - found.seconds, math.inf))
            case events.HangDetected(spent, ends):
                self.hung.append((then - spent, math.inf if ends else then))
            case events.HostState(host, state):
                self._host_state(then, host, state)
            case events.StopRequested():
                self.stopped = min(self.stopped, then)
            case events.AttemptFailed(attempt=result, report=report):
                self.failed = then
                self._failed(report)
                if result.step is not None and self.reports and self.stopped < math.inf:
                    # The journal has only some of its reports, and not the last one.
                    last = (self.stopped, result.step, None)
                    self.reports["", True] = [_Reports(HostClock(0.0), [last])]
            case events.Finished(report):
                self.end = then
                self._failed(report)

    def close(self, end: float) -> None:
        """The journal has no more events. ``end``: of an attempt that has not ended."""
        self.end = min(self.end, end)
        # Reports that arrive after the end of an attempt, and states that last until its end.
        over = min(self.end, self.stopped, self.failed)
        self.hung = [(begin, min(until, over)) for begin, until in self.hung]
        if self.queued is not None:
            self.waits.append((self.queued, self.end))

    def _point(
        self,
        source: tuple[str, bool],
        then: float,
        at: float,
        step: int,
        phases: Mapping[str, float] | None,
    ) -> None:
        reports = self.reports.setdefault(source, [_Reports()])
        if reports[-1].clock.was_set(then, at):
            reports.append(_Reports())
        reports[-1].clock.add(then, at)
        reports[-1].points.append((at, step, phases))

    def _host_state(self, then: float, host: str, state: str) -> None:
        if state == ShownState.RUNNING:
            self.started.setdefault(host, then)
        if state == ShownState.UNREACHABLE:
            self.apart.setdefault(host, then)
        elif state != ShownState.LOST:
            self.apart.pop(host, None)
        if state == ShownState.QUEUED:
            self.queued = then if self.queued is None else self.queued
        elif self.queued is not None:
            self.waits.append((self.queued, then))
            self.queued = None

    def _failed(self, report: Report) -> None:
        self.why, self.ok = report.reason, report.ok
        # Its work ended with the first failure, if the failure's time is that of this attempt.
        times = [failure.time for failure in report.failures if failure.time >= self.begin]
        self.stopped = min([self.stopped, *times])


def attempts_in(records: Records, now: float) -> list[AttemptEvents]:
    """The attempts of a run, which goes on until ``now`` if the journal has no end."""
    attempts: list[AttemptEvents] = []
    latest = 0.0
    for then, event in records:
        if isinstance(event, events.Cleaned):
            continue
        latest = max(latest, then)  # a clock may have been set back
        if not attempts:
            attempts.append(AttemptEvents(1, latest))
        if isinstance(event, events.NextAttempt):
            attempts[-1].end = latest
            attempts.append(AttemptEvents(event.attempt, latest))
        else:
            attempts[-1].add(latest, event)
    for one in attempts:
        one.close(max(latest, now))
    return attempts
