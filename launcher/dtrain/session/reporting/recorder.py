"""Writes the events of a run to its journal and shows them to its observer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from dtrain.diagnostics import DtrainError
from dtrain.failures.cause import Report
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events
from dtrain.runs.events import JournalEvent
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import Journal, JournalReader
from dtrain.session.reporting.observer import Observer
from dtrain.spec.model import Job

SLOW = 5.0
"""Seconds after which the user learns what is waited for."""

UNMATCHED = (
    "warning: no line of the output has the {step} of job.progress.line\n"
    "hint: compare the pattern with a line: a pattern is literal, except for * and spaces"
    " (`dtrain help programs`)"
)
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""A clock that nobody sets, and that goes on while this machine sleeps."""
MAX_NOTICE, MAX_NOTICES = 500, 20
"""Maximum characters of a notice of a host, and maximum notices of each host in a run."""


class Recorder:
    """What every process that is in charge of a run uses, from any thread."""

    def __init__(self, folder: RunFolder, observer: Observer) -> None:
        self.observer = observer
        """For output and telemetry, which have files of their own."""
        self._folder = folder
        self._journal = Journal(folder.journal)
        self._incomplete = False
        self._epoch = time.time() - time.clock_gettime(CLOCK)
        self._noticed: set[str] = set()
        self._noticed_of: dict[str, set[str]] = {}
        self.latest = ""
        """The last notice."""

    def now(self) -> float:
        """Seconds since the epoch. Goes on evenly if the time of day is set during the run."""
        return self._epoch + time.clock_gettime(CLOCK)

    def record(self, event: JournalEvent) -> None:
        self._write(event)
        if isinstance(event, events.SHOWN):
            self.observer.on_event(event)

    def notice(self, text: str, here: str | None = None) -> None:
        """Show ``text`` to the user, now or when they read the journal. This process's user sees
        ``here`` instead: elsewhere, Ctrl-C does not stop the job."""
        self.latest = text
        self._write(events.NoticeShown(text))
        self.observer.notice(text if here is None else here)

    def _write(self, event: JournalEvent) -> None:
        error = self._journal.write(self.now(), event)
        if error is not None and not self._incomplete:
            self._incomplete = True
            reason = f"the run's journal cannot be written: {error.strerror or error}"
            self.observer.notice(f"{reason}; `dtrain ps` may show an old state of the run")

    def notice_once(self, text: str, here: str | None = None, *, kind: str = "") -> None:
        """Like `notice`, unless there was one with this text, or of this ``kind``: of a text that
        comes in several forms."""
        if (kind or text) not in self._noticed:
            self._noticed.add(kind or text)
            self.notice(text, here)

    def notice_of(self, source: str, text: str) -> None:
        """A notice of a host. Each is shown once, because relays and attempts repeat it, and only
        some of each ``source``, because workers can cause notices."""
        shown, text = self._noticed_of.setdefault(source, set()), text[:MAX_NOTICE]
        if text in shown or len(shown) > MAX_NOTICES:
            return
        shown.add(text)
        if len(shown) > MAX_NOTICES:
            text = "more notices are hidden"
        self.notice(f"{source}: {text}")

    @contextlib.contextmanager
    def awaited(self, what: str) -> Iterator[Callable[[], None]]:
        """Say that ``what`` is waited for, unless the block ends within a few seconds. Provides a
        function to call if the wait is over before the block."""
        lock, over = threading.Lock(), False

        def say() -> None:
            with lock:
                if not over:
                    self.notice_once(f"waiting for {what}")

        def end() -> None:
            nonlocal over
            timer.cancel()
            with lock:  # the timer may have expired just now
                over = True

        timer = threading.Timer(SLOW, say)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread is left, and the notice is optional
            timer.start()
        try:
            yield end
        finally:
            end()

    def next_attempt(self, number: int, plan: LaunchPlan) -> None:
        self.record(events.NextAttempt(number, plan.host_names))
        self.observer.on_event(events.AttemptPlanned(plan))

    def allocated(self, plan: LaunchPlan) -> None:
        self.record(events.HostsAllocated(plan.host_names))
        self.observer.on_event(events.HostsPlanned(plan))

    def finished(self, report: Report, job: Job) -> None:
        """The job is over. If its file expects something, show it beside what was measured. If it
        has a pattern for steps that no line matched, say so."""
        if job.expected is not None:
            from dtrain.runs.summary import against_plan

            with contextlib.suppress(DtrainError):  # the folder may be damaged
                if text := against_plan(self._folder, self.now()):
                    self.notice(text)
        if job.progress is not None and report.ok and not self._has_progress():
            self.notice(UNMATCHED)
        self.record(events.Finished(report))

    def _has_progress(self) -> bool:
        """Whether a launcher of this run has seen a step. True if the journal may lack it."""
        with contextlib.suppress(DtrainError):
            if self._incomplete:
                return True
            journaled = JournalReader(self._folder.journal).read()
            return any(isinstance(event, events.Progressed) for _, event in journaled)
        return True
