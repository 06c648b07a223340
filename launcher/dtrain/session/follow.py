"""Show a run from its folder alone: another process controls it, or it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from dtrain.failures.cause import Report
from dtrain.failures.stalls import Stall
from dtrain.failures.stragglers import Straggler
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import Progress
from dtrain.runs.record import Record
from dtrain.runs.telemetry import latest
from dtrain.session.observer import Observer
from dtrain.session.recorder import show

POLL = 0.1
"""Seconds between two reads of files that may have grown."""
SAMPLES = 1.0
"""Seconds between two reads of the hosts' telemetry."""


class RunFollower:
    """Passes what the run's journal and logs contain to an observer."""

    def __init__(self, folder: RunFolder, record: Record, observer: Observer) -> None:
        self._folder = replace(folder, attempt=record.attempt)
        self._record = record
        self._plan = record.plan()
        self._observer = observer
        self._journal = JournalReader(folder.journal)
        self._sizes: dict[Stream, int] = {}
        self._sampled: dict[str, float] = {}
        self._sample_at = 0.0
        self.progress: tuple[Progress, ...] = ()
        """The last two reports before `skip`, which does not show them. Two give a rate."""
        self.stragglers: Straggler | None = None
        """The slow ranks at the time of `skip`, which does not show them."""
        self.report: Report | None = None
        """How the run ended; None until it has."""
        observer.attached(record.run, self._plan, str(folder.path))

    def follow(self, wait: Callable[[float], bool]) -> Report | None:
        """Follow the run until it is over. None if the process in charge exits first, or if
        ``wait``, which waits for that many seconds, returns true."""
        while True:
            in_charge = self._folder.in_charge()
            self.read_new()
            if self.report is not None or in_charge is None or wait(POLL):
                return self.report

    def skip(self) -> None:
        """Show the current state, and then only new events and output."""
        states: dict[str, events.JournalEvent] = {}
        pages: dict[str, events.JournalEvent] = {}
        findings: list[events.JournalEvent] = []
        stall: list[events.JournalEvent] = []
        moved: list[events.JournalEvent] = []
        for then, event in self._journal.read():
            match event:
                case events.HostState(host):
                    states[host] = event
                case events.TensorBoardAddress(host):
                    pages[host] = event
                case events.LauncherAttached():
                    self.stragglers = None
                    stall = []
                    pages.clear()
                case events.Findings():
                    findings = [event]
                case events.Progressed():
                    self.progress = (*self.progress[-1:], event.report)
                case events.StragglersChanged(found):
                    self.stragglers = found
                case events.StallChanged(standing):
                    stall = [_until_now(standing, then)] if standing is not None else []
                case events.NextAttempt(attempt):
                    self.progress, self.stragglers = (), None
                    states.clear()
                    pages.clear()
                    findings, stall, moved = [], [], []
                    if attempt > self._record.attempt:
                        self._forward(event)  # it began after the record was read
                case events.HostsAllocated(hosts):
                    states.clear()
                    # It may be newer than the record that was read.
                    moved = [event] if hosts != self._record.allocated else []
                case events.Finished(report):
                    self.report = report
        for event in (*moved, *findings, *states.values(), *pages.values(), *stall):
            self._forward(event)
        for stream, size in self._folder.sizes(self._plan).items():
            self._sizes[stream] = size
            self._observer.skip(stream, size)

    def read_new(self) -> None:
        """Show what is new since the last call."""
        for _, event in self._journal.read():
            self._forward(event)
        for stream, size in self._folder.sizes(self._plan).items():
            if size > self._sizes.get(stream, 0):
                self._sizes[stream] = size
                self._observer.output(stream, size)
        if time.monotonic() >= self._sample_at:
            self._sample_at = time.monotonic() + SAMPLES
            self._show_samples()

    def _show_samples(self) -> None:
        for part in self._plan.hosts:
            host = part.host.name
            sample = latest(self._folder.path, host)
            if sample is not None and sample.time != self._sampled.get(host):
                self._sampled[host] = sample.time
                self._observer.telemetry(host, sample)

    def _forward(self, event: events.JournalEvent) -> None:
        match event:
            case events.Progressed(report):
                self._observer.progress("", report)
            case events.NextAttempt(attempt):
                # The record may already describe a later attempt.
                self._record = replace(Record.load(self._folder.path), attempt=attempt)
                self._plan = self._record.plan()
                self._folder = replace(self._folder, attempt=attempt)
                self._observer.next_attempt(attempt, self._plan)
            case events.HostsAllocated(hosts) if len(hosts) == len(self._plan.hosts):
                self._plan = self._plan.on(hosts)
                self._observer.allocated(self._plan)
            case events.Finished(ended):
                self.report = ended
            case _:
                show(event, self._observer)


def _until_now(stall: Stall, then: float) -> events.StallChanged:
    """``stall``, which was found at ``then`` (seconds since the epoch), as it is now."""
    longer = max(0.0, time.time() - then)
    return events.StallChanged(replace(stall, seconds=stall.seconds + longer))


def ending(folder: RunFolder) -> Report | None:
    """How a run ended; None if it has not. Raises UsageError as `JournalReader.read` does."""
    report = None
    for _, event in JournalReader(folder.journal).read():
        if isinstance(event, events.Finished):
            report = event.report
    return report
