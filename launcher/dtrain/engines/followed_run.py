"""A run whose processes another system controls: Slurm, Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dtrain.diagnostics import ExitCode, NodeError
from dtrain.failures.cause import Failure, Report
from dtrain.failures.launchers import root_rank
from dtrain.launchplan import names
from dtrain.launchplan.plan import HostPlan, Process
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import tail
from dtrain.runs.record import Record
from dtrain.runs.restart import AttemptResult
from dtrain.runs.storage import StorageError
from dtrain.session.beginning import save
from dtrain.session.caller import Caller
from dtrain.session.failure_output import explained
from dtrain.session.finishing import completed, finish
from dtrain.session.notifications import Notifications
from dtrain.session.recorder import Recorder

_SUMMARY = 64 << 10
"""Bytes at the end of a torchrun's stderr, which has its summary."""


class FollowedRun:
    """Its record, journal and notifications, and the plan and the folder of its current attempt.
    Only the thread that follows the run calls it."""

    def __init__(
        self, record: Record, folder: RunFolder, caller: Caller, secrets: Mapping[str, str]
    ) -> None:
        """``secrets`` are for notifications."""
        self.record, self.folder = record, folder
        self.plan = record.plan()
        self.recorder = Recorder(folder, caller.observer)
        self._caller = caller
        self._notifications = Notifications(record.request, folder, self.recorder, secrets)

    def begun(self, how: str) -> None:
        """The other system has the job."""
        self.recorder.notice(how)
        self._caller.on_running(self.record.run)

    def change(self, **fields: Any) -> None:
        """Save the record with new values. Raises StorageError."""
        self.record = replace(self.record, **fields)
        self.plan = save(self.record, self.folder)

    def next_attempt(
        self, report: Report, then: str, *, step: int | None = None, **fields: Any
    ) -> None:
        """Another attempt follows the one that ended with ``report``. ``then``: what happens now;
        ``step``: the last one that a worker reported; ``fields``: changes of the record."""
        number = self.record.attempt
        report = completed(report, self.record, self.folder)
        culprit = report.failures[0].host if report.failures else None
        result = AttemptResult(ran=True, step=step, culprit=culprit)
        self.recorder.record(events.AttemptFailed(number, result, report))
        self._notifications.send("restarted", number, report)
        self.recorder.notice(f"{report.reason}; {then} (restart {number})")
        self.change(attempt=number + 1, **fields)
        self.folder = replace(self.folder, attempt=number + 1)
        self.recorder.next_attempt(number + 1, self.plan)

    def left_over(self) -> None:
        """The attempt may not have ended: `dtrain stop` tries again."""
        hosts = self.record.spec().cluster.hosts
        self.change(leftovers=tuple((host.name, self.record.attempt) for host in hosts))

    def given_up(self, why: str, still_there: str) -> Report:
        """The report if the attempt may not have ended, and dtrain no longer waits."""
        self.left_over()
        hint = f"`dtrain stop {self.record.run}` tries again"
        return Report(ExitCode.INTERRUPTED, why, problems=(still_there,), hint=hint)

    def explained(self, failure: Failure) -> Failure:
        """The failure with what its process wrote about it; of a torchrun, that of the first
        rank."""
        logs = self.folder.logs
        name = f"{names.process_name(failure.role, failure.index)}.err"
        stderr = tail(logs / failure.host / name, _SUMMARY).decode(errors="replace")
        return explained(root_rank(failure, stderr), logs)

    def leave(self) -> Report:
        """The job goes on without this process."""
        self._notifications.close()
        self._caller.observer.on_event(events.RunLeft(self.record.run))
        return Report(ExitCode.INTERRUPTED, "left", logs=str(self.folder.path))

    def finish(self, report: Report) -> Report:
        """Record the end of the run, and notify about it."""
        report = completed(report, self.record, self.folder)
        finish(report, self.record, self.recorder, self._notifications)
        return report


def process_failure(
    part: HostPlan,
    process: Process,
    time: float,
    *,
    code: int | None,
    signal: str | None,
    memory_full: bool,
) -> Failure:
    """``memory_full``: whether its machine or its container ran out of memory."""
    name = part.host.name
    failure = Failure(name, process.role, process.index, process.rank, time, code, signal)
    return replace(failure, out_of_memory=memory_full and failure.ended_by == "SIGKILL")


def not_begun(what: str, error: NodeError) -> Report:
    """The report of a job that could not be ``submitted`` or ``created``."""
    reason = f"not {what}: {error.attempted} failed"
    return Report(error.exit_code, reason, problems=(error.message,), hint=error.hint)


def not_stored(error: StorageError, still_there: str) -> Report:
    """The report of a run whose files this machine cannot store. ``still_there``: how to find and
    end the job."""
    reason = "this machine cannot store the run's files"
    problems = (f"{error.message}\n{still_there}",)
    return Report(error.exit_code, reason, problems=problems, hint=error.hint)
