"""Shows a run that another process is in charge of, or that is over, from its folder alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dtrain.cause import Failure, Report
from dtrain.check import Finding
from dtrain.diagnostics import ExitCode
from dtrain.failures.kernel import KernelMessage
from dtrain.journal import JournalReader
from dtrain.logs.store import RunFolder, Stream
from dtrain.progress import Progress
from dtrain.record import Record
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
        states: dict[str, dict[str, Any]] = {}
        pages: dict[str, dict[str, Any]] = {}
        findings: list[dict[str, Any]] = []
        for event in self._journal.read():
            match event["event"]:
                case "host":
                    states[event["host"]] = event
                case "tensorboard":
                    pages[event["host"]] = event
                case "attached":
                    pages.clear()
                case "findings":
                    findings = [event]
                case "attempt":
                    states.clear()
                    pages.clear()
                    findings = []
                    if event["attempt"] > self._record.attempt:
                        self._tell(event)  # it has come since the record was read
                case "finished":
                    self.report = read_report(event)
        for event in (*findings, *states.values(), *pages.values()):
            self._tell(event)
        for stream, size in self._folder.sizes(self._plan).items():
            self._sizes[stream] = size
            self._observer.skip(stream, size)

    def look(self) -> None:
        """Tell what is new since the last look."""
        for event in self._journal.read():
            self._tell(event)
        for stream, size in self._folder.sizes(self._plan).items():
            if size > self._sizes.get(stream, 0):
                self._sizes[stream] = size
                self._observer.output(stream, size)

    def _tell(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "host":
                self._observer.host_state(event["host"], event["state"], event["detail"])
            case "notice" | "tensorboard":
                self._observer.notice(event["text"])
            case "findings":
                self._observer.checked([Finding.from_json(body) for body in event["findings"]])
            case "progress":
                self._observer.progress("", Progress.read(event["process"], event["said"]))
            case "attempt":
                # It may be of a later attempt by now.
                self._record = replace(Record.load(self._folder.path), attempt=event["attempt"])
                self._plan = self._record.plan()
                self._folder = replace(self._folder, attempt=event["attempt"])
                self._observer.again(event["attempt"], self._plan)
            case "finished":
                self.report = read_report(event)


def read_report(event: dict[str, Any]) -> Report:
    """The report in a journal's ``finished`` event."""
    return Report(
        exit_code=ExitCode(event["exit_code"]),
        reason=event["reason"],
        failures=tuple(_read_failure(failure) for failure in event["failures"]),
        problems=tuple(event["problems"]),
        hint=event["hint"],
        seconds=event["seconds"],
        logs=event["logs"],
    )


def _read_failure(body: dict[str, Any]) -> Failure:
    kernel = body.pop("kernel", None)
    return Failure(**body, kernel=KernelMessage(**kernel) if kernel is not None else None)


def ending(folder: RunFolder) -> Report | None:
    """How a run ended; None while it goes on."""
    ends = [event for event in JournalReader(folder.journal).read() if event["event"] == "finished"]
    return read_report(ends[-1]) if ends else None
