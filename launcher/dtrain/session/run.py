"""A run that this process is in charge of: its attempts and its end. All engines use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.restart import AttemptResult
from dtrain.runs.storage import CANNOT_STORE
from dtrain.session.caller import Caller
from dtrain.session.reporting.notifications import Notifications
from dtrain.session.reporting.recorder import Recorder


class Run:
    """Its record, journal and notifications, and the folder of its current attempt. Only the
    thread that follows the run calls it."""

    def __init__(
        self, record: Record, folder: RunFolder, caller: Caller, secrets: Mapping[str, str]
    ) -> None:
        """``secrets``: those that this process knows."""
        self.record, self.folder, self.secrets = record, folder, secrets
        self.recorder = Recorder(folder, caller.observer)
        self._caller = caller
        self._notifications = Notifications(record.request, folder, self.recorder, secrets)

    @property
    def plan(self) -> LaunchPlan:
        """The plan of the current attempt."""
        return self.record.plan

    def change(self, **fields: Any) -> None:
        """Save the record with new values. Raises StorageError; they count in this process then."""
        self.record = replace(self.record, **fields)
        self.record.save(self.folder.path)

    def attempt_failed(self, report: Report, result: AttemptResult) -> None:
        """Another attempt follows the one that ended with ``report``."""
        number = self.record.attempt
        report = self._completed(report)
        self.recorder.record(events.AttemptFailed(number, result, report))
        self._notifications.send("restarted", number, report)

    def begin_attempt(self, record: Record) -> None:
        """``record``: that of the next attempt. Raises StorageError."""
        self.record, self.folder = record, replace(self.folder, attempt=record.attempt)
        self.record.save(self.folder.path)
        self.recorder.next_attempt(record.attempt, self.plan)
        self.recorder.latest = ""

    def left(self, report: Report, *, still_running: bool | None = True) -> Report:
        """The run goes on without this process. For ``still_running`` see `RunLeft`."""
        self._notifications.close()
        self._caller.observer.on_event(events.RunLeft(self.record.run, still_running))
        return self._completed(report)

    def unattended(self, report: Report) -> Report:
        """As `left`: this process cannot follow the run any more, and nobody asked it to leave."""
        self.recorder.notice(report.reason)
        self._notifications.send("unattended", self.record.attempt, self._completed(report))
        return self.left(report, still_running=None)

    def finish(self, report: Report) -> Report:
        """Notify about the end of the run, and record it."""
        report = self._notified(report)
        self.recorder.finished(report, self.record.request.spec().job)
        return report

    def finish_unstored(self, report: Report) -> Report:
        """As `finish`, if this machine could not store all output. The end is not recorded, so that
        `dtrain attach` fetches the rest."""
        self.recorder.notice(f"{CANNOT_STORE}; this launcher ends")
        if self.folder.path.is_dir():
            rest = f"`dtrain attach {self.record.run}` fetches the rest of the output"
            report = replace(report, hint=f"{report.hint}\n{rest}".lstrip())
        report = self._notified(report)
        self._caller.observer.on_event(events.Finished(report))
        return report

    def _notified(self, report: Report) -> Report:
        report = self._completed(report)
        if report.exit_code is not ExitCode.INTERRUPTED:
            self._notifications.send("done" if report.ok else "failed", self.record.attempt, report)
        self._notifications.close()
        return report

    def _completed(self, report: Report) -> Report:
        """The report with what only the run knows: its duration and its folder."""
        seconds = max(0.0, self.recorder.now() - self.record.started)
        return replace(report, seconds=seconds, logs=str(self.folder.path))
