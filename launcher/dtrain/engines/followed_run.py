"""A run whose processes another system controls: Slurm, Kubernetes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from dtrain.diagnostics import ExitCode, NodeError
from dtrain.failures.cause import LEFT, Failure, Report
from dtrain.failures.launchers import root_rank
from dtrain.launchplan import names
from dtrain.launchplan.plan import HostPlan, Process
from dtrain.runs.log_store import tail
from dtrain.runs.restart import AttemptResult
from dtrain.runs.storage import CANNOT_STORE, StorageError
from dtrain.session.run import Run
from dtrain.session.watching.failure_output import explained, explained_by_torchrun

_SUMMARY = 64 << 10
"""Bytes at the end of a torchrun's stderr, which has its summary."""


class FollowedRun(Run):
    """What Slurm and Kubernetes have in common."""

    ranks_share_stderr = False
    """Whether ranks write to the stderr of their torchrun."""

    def begun(self, how: str) -> None:
        """The other system has the job."""
        self.recorder.notice(how)
        self._caller.on_running(self.record.run)

    def next_attempt(
        self, report: Report, then: str, *, step: int | None = None, **fields: Any
    ) -> None:
        """Another attempt follows the one that ended with ``report``. ``then``: what happens now;
        ``step``: the last one that a worker reported; ``fields``: changes of the record."""
        number = self.record.attempt
        culprit = report.failures[0].host if report.failures else None
        self.attempt_failed(report, AttemptResult(ran=True, step=step, culprit=culprit))
        self.recorder.notice(f"{report.reason}; {then} (restart {number})")
        self.begin_attempt(replace(self.record, attempt=number + 1, **fields))

    def left_over(self) -> None:
        """The attempt may not have ended: `dtrain stop` tries again."""
        hosts = self.record.spec().cluster.hosts
        # On a full disk, the report alone says how to end it.
        with contextlib.suppress(StorageError):
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
        name = names.process_name(failure.role, failure.index)
        stderr = tail(logs / failure.host / f"{name}.err", _SUMMARY).decode(errors="replace")
        found = explained(root_rank(failure, stderr), logs)
        return explained_by_torchrun(found, logs, name) if self.ranks_share_stderr else found

    def leave(self, report: Report = LEFT) -> Report:
        """The job goes on without this process."""
        return self.left(report)

    def leave_unstored(self, error: StorageError) -> Report:
        """As `leave`: this machine cannot store the run's files. A later process can fetch them."""
        self.recorder.notice(f"{error.message}; {error.hint}")
        problems = (error.message,)
        return self.leave(Report(error.exit_code, CANNOT_STORE, problems=problems, hint=error.hint))


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
