"""Show a run from its folder alone: another process controls it, or it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from dtrain.diagnostics import UsageError
from dtrain.failures.cause import Report
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import Stream
from dtrain.runs.observed import ObservedRun
from dtrain.runs.record import Record
from dtrain.runs.telemetry import latest
from dtrain.session.reporting.observer import Observer

POLL = 0.1
"""Seconds between two reads of files that may have grown."""
REST = 4
"""Each pause lasts at least this many times the processor time of the read before it: a job may
have thousands of files."""
SAMPLES = 1.0
"""Seconds between two reads of the hosts' telemetry."""


class RunFollower:
    """Passes what the run's journal and logs contain to an observer."""

    def __init__(self, folder: RunFolder, record: Record, observer: Observer) -> None:
        self._folder = replace(folder, attempt=record.attempt)
        self._record = record
        self._plan = record.plan
        self._observer = observer
        self._journal = JournalReader(folder.journal)
        self._sizes: dict[Stream, int] = {}
        self._sampled: dict[str, float] = {}
        self._sample_at = 0.0
        self.state = ObservedRun()
        """From the events that were read."""
        observer.on_event(events.RunAttached(record.run, self._plan, str(folder.path)))

    def follow(self, wait: Callable[[float], bool]) -> Report | None:
        """Follow the run until it is over. None if the process in charge exits first, or if
        ``wait``, which waits for that many seconds, returns true."""
        while True:
            in_charge, begun = self._folder.in_charge(), time.thread_time()
            self.read_new()
            pause = max(POLL, REST * (time.thread_time() - begun))
            if self.state.report is not None or in_charge is None or wait(pause):
                return self.state.report

    def skip(self) -> None:
        """Show the current state of the hosts, and then only new events and output."""
        self.state = ObservedRun.of(self._journal.read())
        now = self.state.attempt
        if now.number > self._record.attempt:
            self._begin(now.number)  # it began after the record was read
        if now.allocated and now.allocated != self._record.allocated:
            self._allocate(now.allocated)  # it may be newer than the record
        hosts = [event for _, event in now.hosts.values()]
        for event in (now.findings, *hosts, *now.tensorboards.values()):
            if event is not None:
                self._observer.on_event(event)
        if stall := now.stall_at(time.time()):
            self._observer.on_event(events.StallChanged(stall))
        for stream, size in self._folder.sizes(self._plan).items():
            self._sizes[stream] = size
            self._observer.skip(stream, size)

    def show_training(self) -> None:
        """Show the progress and the slow ranks, which `skip` does not show."""
        known = self.state.attempt.progress
        for report in known:
            followed = report is not known[-1]
            self._observer.on_event(events.ProgressReported("", report, followed))
        if (slow := self.state.attempt.slow) is not None:
            self._observer.on_event(events.StragglersChanged(slow))

    def read_new(self) -> None:
        """Show what is new since the last call."""
        if new := list(self._journal.read()):
            self._show_output()  # what came before these events, such as the last of an attempt
        for then, event in new:
            self.state.add(then, event)
            self._forward(event)
        self._show_output()
        if time.monotonic() >= self._sample_at:
            self._sample_at = time.monotonic() + SAMPLES
            self._show_samples()

    def _show_output(self) -> None:
        for stream, size in self._folder.sizes(self._plan).items():
            if size > self._sizes.get(stream, 0):
                self._sizes[stream] = size
                self._observer.output(stream, size)

    def _show_samples(self) -> None:
        for part in self._plan.hosts:
            host = part.host.name
            sample = latest(self._folder.path, host)
            if sample is not None and sample.time != self._sampled.get(host):
                self._sampled[host] = sample.time
                self._observer.on_event(events.Sampled(host, sample))

    def _forward(self, event: events.JournalEvent) -> None:
        match event:
            case events.Progressed(report):
                self._observer.on_event(events.ProgressReported("", report))
            case events.NextAttempt(attempt):
                self._show_output()  # what the last attempt has written since the last look
                self._begin(attempt)
            case events.HostsAllocated(hosts):
                self._allocate(hosts)
            case events.Finished():
                pass  # the caller shows the report, once the process in charge has exited
            case _ if isinstance(event, events.SHOWN):
                self._observer.on_event(event)

    def _begin(self, attempt: int) -> None:
        # The record may already describe a later attempt.
        self._record = replace(Record.load(self._folder.path), attempt=attempt)
        self._plan = self._record.plan
        self._folder = replace(self._folder, attempt=attempt)
        self._observer.on_event(events.AttemptPlanned(self._plan))

    def _allocate(self, hosts: tuple[str, ...]) -> None:
        if len(hosts) == len(self._plan.hosts):
            self._plan = self._plan.on(hosts)
            self._observer.on_event(events.HostsPlanned(self._plan))


def ending(folder: RunFolder) -> Report | None:
    """How a run ended; None if it has not. Raises UsageError as `JournalReader.read` does."""
    return ObservedRun.read(folder).report


def ending_after(folder: RunFolder, act: Callable[[], Report | None]) -> Report | None:
    """How a run ended, after ``act`` if it had not. ``act`` raises UsageError if it comes too late.
    It may return a report, for a run whose records have none."""
    report = ending(folder)
    if report is None:
        try:
            report = act()
        except UsageError:
            if ending(folder) is None:
                raise
        report = ending(folder) or report
    return report
