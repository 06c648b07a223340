"""Ends a run: its report, and who hears of it. All engines use it."""

from __future__ import annotations

import time
from dataclasses import replace

from dtrain.diagnostics import ExitCode
from dtrain.failures.cause import Report
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.session.notifications import Notifications
from dtrain.session.recorder import Recorder


def completed(report: Report, record: Record, folder: RunFolder) -> Report:
    """The report of an attempt, with what only the run knows: its duration and its folder."""
    seconds = max(0.0, time.time() - record.started)
    return replace(report, seconds=seconds, logs=str(folder.path))


def finish(
    report: Report, record: Record, recorder: Recorder, notifications: Notifications
) -> None:
    """Notify about the end of the run, and record it."""
    if report.exit_code is not ExitCode.INTERRUPTED:
        notifications.send("done" if report.ok else "failed", record.attempt, report)
    notifications.close()
    recorder.finished(report, record.request.spec().job)
