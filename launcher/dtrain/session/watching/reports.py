"""Shows and journals the progress and the steps of workers, which report them through
`dtrain.runtime` or print them."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.decode import ProtocolError, excerpt
from dtrain.runs import events
from dtrain.runs.log_store import Stream
from dtrain.runs.progress import Progress, Representative, StepReport, speaker
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.printed import PrintedProgress
from dtrain.session.watching.steps import StepWatch

LEAST_SECONDS, MOST_SECONDS = 1.0, 10.0
"""Seconds between two progress reports in the journal, which other processes show."""
SHARE = 0.01
"""Within these limits, they are this share of the time that has passed: in the first seconds users
look more closely, and a short run has little else."""


class ProgressReports:
    """Shows the progress of workers, journals that of the whole job, and watches their steps. Any
    thread may call it."""

    def __init__(self, plan: LaunchPlan, recorder: Recorder) -> None:
        self.steps = StepWatch(plan.world_size)
        """What the ranks report about their steps."""
        self._output = PrintedProgress(plan, self.add)
        self._reported: dict[str, int] = {}
        """The last step of each worker that has reported one."""
        self._printed: dict[str, int] = {}
        """The last step of each worker that has printed one."""
        self._told = False
        """Whether a worker reports its progress through `dtrain.runtime`."""
        self._representative = Representative()
        self._speaker = speaker(plan)
        """Its phases are those of the job: they add up only for one process."""
        self._recorder = recorder
        # Which report represents the job, and the order of the journal. Reentrant, because what is
        # journaled may call back.
        self._lock = threading.RLock()
        self._phases: Mapping[str, float] = {}
        self._begun: tuple[str, bool] | None = None
        """The source of the last reports whose first step is in the journal."""
        self._done = 0
        """Steps, as of the last report with its phases."""
        self._started = time.monotonic()
        self._due: dict[str, float] = {}
        """When the next event of a kind may go into the journal."""
        self._unwritten: dict[str, events.JournalEvent] = {}
        """The newest events that are not yet in the journal, by kind."""

    @property
    def step(self) -> int | None:
        """The last step of the worker that is furthest: which report comes last is chance. What is
        printed only counts without other reports."""
        last = self._reported if self._told else self._printed
        return max(last.copy().values(), default=None)

    def add(self, host: str, file: str, fields: Any) -> bool:
        """Add a report from a worker's ``file``. Returns False if it reports no activity.

        ``fields`` may have any shape. An error in it is only noted, because what reads the file did
        not cause it.
        """
        if not isinstance(fields, dict):
            return True
        process = file.removesuffix(".progress")
        try:
            match fields.get("event"):
                case "progress":
                    progress = Progress.read(process, fields)
                    self._told |= not progress.printed
                    self._show(host, progress)
                    if progress.step == progress.total:
                        self.steps.end(process)
                case "steps":
                    report = StepReport.read(process, fields)
                    self._journal_phases(report)
                    self.steps.add(host, report, time.monotonic())
        except ProtocolError as error:
            text = f"{host}: ignored a report of {excerpt(process)}: {error}"
            self._recorder.notice_once(text, kind=f"reports of {host}")
        return fields.get("waits") is None

    def add_output(self, stream: Stream, piece: bytes) -> None:
        """Add the progress in new output of a worker, which counts until a worker reports its
        progress through `dtrain.runtime`."""
        if not self._told:
            self._output.add(stream, piece)

    def _show(self, host: str, report: Progress) -> None:
        last = self._printed if report.printed else self._reported
        last[report.process] = report.step
        self._recorder.observer.on_event(events.ProgressReported(host, report))
        with self._lock:
            if self._representative.reports(report):
                # `dtrain report` counts the time until the first step as the start, and measures
                # steps between reports of one source: the fastest rank may report before rank 0.
                first = report.step > 0 and report.source != self._begun
                if first:
                    self._begun = report.source
                at_once = first or report.step == report.total
                self._journal(events.Progressed(report), at_once=at_once)

    def _journal_phases(self, report: StepReport) -> None:
        """Journal how long the job was in its phases, and its last step: at once after a
        checkpoint, because work is lost from there on."""
        before = self._phases
        news = report.phases != before or report.done != self._done
        if report.process != self._speaker or not news:
            return
        rare = any(report.phases.get(name) != before.get(name) for name in ("save", "load"))
        self._phases, self._done = report.phases, report.done
        spent = events.PhasesSpent(report.time, report.done, report.phases, report.process)
        self._journal(spent, at_once=rare)

    def _journal(self, event: events.JournalEvent, *, at_once: bool) -> None:
        with self._lock:
            self._unwritten[event.kind] = event
            if at_once:
                self._due.pop(event.kind, None)
            self.write_due()

    def write_due(self) -> None:
        """Journal what had to wait. Called all the time: a job that hangs reports nothing more."""
        now = time.monotonic()
        with self._lock:
            for kind in [*self._unwritten]:
                if now >= self._due.get(kind, 0.0):
                    pause = SHARE * (now - self._started)
                    self._due[kind] = now + max(LEAST_SECONDS, min(pause, MOST_SECONDS))
                    self._write(kind)

    def close(self) -> None:
        """Journal the last step and the last phases: no more reports follow."""
        with self._lock:
            for kind in [*self._unwritten]:
                self._write(kind)

    def _write(self, kind: str) -> None:
        # A report that arrives while another event is written may have written this one.
        event = self._unwritten.pop(kind, None)
        if event is not None:
            self._recorder.record(event)
