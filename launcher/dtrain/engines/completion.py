"""The end of an attempt and of a run whose processes another system controls: Slurm, Kubernetes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Failure, Report
from dtrain.failures.torchrun import root_rank
from dtrain.launchplan import names
from dtrain.runs.log_store import RunFolder, tail
from dtrain.runs.record import Record
from dtrain.session.ending import explained
from dtrain.session.notifications import Notifications
from dtrain.session.recorder import Recorder
from dtrain.spec.model import NotifyEvent

_SUMMARY = 64 << 10
"""Bytes at the end of a torchrun's stderr, which has its summary."""


def with_cause(failure: Failure, logs: Path) -> Failure:
    """The failure with what its process wrote about it; of a torchrun, that of the first rank."""
    name = f"{names.process_name(failure.role, failure.index)}.err"
    stderr = tail(logs / failure.host / name, _SUMMARY).decode(errors="replace")
    return explained(root_rank(failure, stderr), logs)


def completed(report: Report, record: Record, folder: RunFolder) -> Report:
    """The report with the run's folder and duration."""
    seconds = max(0.0, time.time() - record.started)
    return replace(report, seconds=seconds, logs=str(folder.path))


def announce(
    report: Report, record: Record, notifications: Notifications, recorder: Recorder
) -> None:
    """Send and record the end of a run."""
    if report.exit_code is not ExitCode.INTERRUPTED:
        event: NotifyEvent = "done" if report.ok else "failed"
        notifications.send(event, record.attempt, report)
    notifications.close()
    recorder.finished(report)
