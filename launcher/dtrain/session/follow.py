"""Shows a run that another process is in charge of, or that is over, from its folder alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dtrain.failures.cause import Report
from dtrain.runs import journal
from dtrain.runs.journal import JournalReader
from dtrain.runs.log_store import RunFolder, Stream
from dtrain.runs.record import Record
from dtrain.session.observer import Observer

POLL = 0.1
"""Seconds between two looks at files that may have grown."""


class Follower:
    """Tells an observer what the run's journal and logs say."""

    def __init__(self, folder: RunFolder, record: Record, observer: Observer) -> None:
        self._folder = replace(folder, attempt=record.attempt)
        self._record = record
        self._plan = record.plan()
        self._observer = observer
        self._journal = JournalReader(folder.journal)
        self._sizes: dict[Stream, int] = {}
        self.report: Report | None = None
        """How the run ended, once it has."""
        observer.attached(record.run, self._plan, str(folder.path))

    def follow(self, wait: Callable[[float], bool]) -> Report | None:
        """Tell of all that happens until the run is over; None when the process in charge has
        gone before that, or ``wait``, which waits for so many seconds, says that it is enough."""
        while True:
            in_charge = self._folder.in_charge()
            self.look()
            if self.report is not None or in_charge is None or wait(POLL):
                return self.report

    def skip(self) -> None:
        """Show only what comes from now on, and how things stand."""
        states: dict[str, journal.Event] = {}
        pages: dict[str, journal.Event] = {}
        findings: list[journal.Event] = []
        for _, event in self._journal.read():
            match event:
                case journal.HostState(host):
                    states[host] = event
                case journal.TensorBoard(host):
                    pages[host] = event
                case journal.Attached():
                    pages.clear()
                case journal.Findings():
                    findings = [event]
                case journal.NextAttempt(attempt):
                    states.clear()
                    pages.clear()
                    findings = []
                    if attempt > self._record.attempt:
                        self._tell(event)  # it has come since the record was read
                case journal.Finished(report):
                    self.report = report
        for event in (*findings, *states.values(), *pages.values()):
            self._tell(event)
        for stream, size in self._folder.sizes(self._plan).items():
            self._sizes[stream] = size
            self._observer.skip(stream, size)

    def look(self) -> None:
        """Tell what is new since the last look."""
        for _, event in self._journal.read():
            self._tell(event)
        for stream, size in self._folder.sizes(self._plan).items():
            if size > self._sizes.get(stream, 0):
                self._sizes[stream] = size
                self._observer.output(stream, size)

    def _tell(self, event: journal.Event) -> None:
        match event:
            case journal.HostState(host, state, detail):
                self._observer.host_state(host, state, detail)
            case journal.Notice(text) | journal.TensorBoard(_, text):
                self._observer.notice(text)
            case journal.Findings(findings):
                self._observer.checked(findings)
            case journal.Progressed(report):
                self._observer.progress("", report)
            case journal.NextAttempt(attempt):
                # It may be of a later attempt by now.
                self._record = replace(Record.load(self._folder.path), attempt=attempt)
                self._plan = self._record.plan()
                self._folder = replace(self._folder, attempt=attempt)
                self._observer.again(attempt, self._plan)
            case journal.Finished(ended):
                self.report = ended


def ending(folder: RunFolder) -> Report | None:
    """How a run ended; None while it goes on. Raises UsageError as `JournalReader.read` does."""
    report = None
    for _, event in JournalReader(folder.journal).read():
        if isinstance(event, journal.Finished):
            report = event.report
    return report
