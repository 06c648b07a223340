"""Handles reports of one host's workers through `dtrain.runtime`: progress and TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from dtrain.launchplan.plan import HostPlan, LaunchPlan
from dtrain.runs import journal
from dtrain.runs.progress import Progress, StepReport, speaker
from dtrain.session.context import AttemptContext
from dtrain.session.forward import Forward
from dtrain.session.recorder import Recorder
from dtrain.session.steps import StepWatch
from dtrain.transport.contract import Connection

JOURNAL_SECONDS = 10.0
"""Seconds between two progress reports in the journal."""


class ProgressReports:
    """Shows the progress of workers, journals that of the whole job, and watches their steps."""

    def __init__(self, plan: LaunchPlan, recorder: Recorder, steps: StepWatch) -> None:
        self.step: int | None = None
        """The last step that a worker has reported."""
        self._speaker = speaker(plan)
        self._recorder = recorder
        self._steps = steps
        self._journal_at = 0.0
        self._phases: Mapping[str, float] = {}
        self._phases_at = 0.0
        self._unwritten: journal.PhasesSpent | None = None

    def add(self, host: str, process: str, fields: Any) -> None:
        """Add a report. ``fields`` comes from the worker and may have any shape; errors in it are
        ignored, because what reads the worker's file did not cause them."""
        with suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
            match fields.get("event"):
                case "progress":
                    progress = Progress.read(process, fields)
                    self._show(host, progress)
                    if progress.step == progress.total:
                        self._steps.end(process)
                case "steps":
                    report = StepReport.read(process, fields)
                    self._journal_phases(report)
                    self._steps.add(host, report, time.monotonic())

    def _show(self, host: str, report: Progress) -> None:
        self.step = report.step
        self._recorder.observer.progress(host, report)
        now = time.monotonic()
        due = now >= self._journal_at or report.step == report.total
        if due and report.process == self._speaker:
            self._journal_at = now + JOURNAL_SECONDS
            self._recorder.record(journal.Progressed(report))

    def _journal_phases(self, report: StepReport) -> None:
        """Journal how long the job was in its phases: at once after a checkpoint, because work is
        lost from there on."""
        if report.process != self._speaker or report.phases == self._phases:
            return
        now, before = time.monotonic(), self._phases
        rare = any(report.phases.get(name) != before.get(name) for name in ("save", "load"))
        self._phases = report.phases
        self._unwritten = journal.PhasesSpent(report.time, report.done, report.phases)
        if rare or now >= self._phases_at:
            self._phases_at = now + JOURNAL_SECONDS
            self.close()

    def close(self) -> None:
        """Journal the last phases: no more reports follow."""
        if self._unwritten is not None:
            self._recorder.record(self._unwritten)
            self._unwritten = None


class WorkerReports:
    def __init__(
        self, context: AttemptContext, part: HostPlan, connection: Callable[[], Connection | None]
    ) -> None:
        """``connection`` returns the host's current connection, for TensorBoard."""
        self.progress = ProgressReports(context.plan, context.recorder, context.steps)
        self._context = context
        self._host = part.host
        self._connection = connection
        self._tensorboard: Forward | None = None

    def close(self) -> None:
        self.progress.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def add(self, process: str, fields: dict[str, Any]) -> None:
        """Add a report, see `ProgressReports.add`."""
        self.progress.add(self._host.name, process, fields)
        with suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
            wanted = self._context.tensorboard and self._tensorboard is None
            if wanted and fields.get("event") == "tensorboard":
                self._show_tensorboard(int(fields["port"]))

    def _show_tensorboard(self, port: int) -> None:
        if not 1024 <= port <= 65535:
            return
        context, host = self._context, self._host.name
        if self._host.transport != "local":
            try:
                self._tensorboard = Forward(port, self._connection)
            except OSError as error:
                context.recorder.notice(f"cannot show {host}'s TensorBoard here: {error}")
                return
            port = self._tensorboard.port
        text = f"TensorBoard of {host}: http://127.0.0.1:{port}/"
        context.recorder.record(journal.TensorBoardAddress(host, text))
