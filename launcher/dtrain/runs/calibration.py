"""What the planner learns from a run: its layout and the time of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dtrain.diagnostics import UsageError
from dtrain.parallelism.calibrated import MeasuredRun, calibrated
from dtrain.parallelism.cluster.hardware import PRECISIONS
from dtrain.parallelism.question import Question
from dtrain.runs.folder import RunFolder
from dtrain.runs.journal import JournalReader
from dtrain.runs.measured import points
from dtrain.runs.record import Record


def learned(question: Question, runs: Sequence[str]) -> Question:
    """The question with the speed of the machine in these runs, named as for `RunFolder.find`.

    Raises UsageError if a run has no layout or no steps, or trained another model.
    """
    return calibrated(question, [_measured(name) for name in runs])


def _measured(name: str) -> MeasuredRun:
    folder = RunFolder.find(name)
    record = Record.load(folder.path)
    job, plan = record.spec().job, record.plan
    training = job.training
    if job.layout is None or training is None or training.seq_len is None:
        raise UsageError(
            f"run {folder.name}: its cluster file has no job.layout with job.training.seq_len",
            hint="launch a file that `dtrain plan --output` has written",
        )
    if record.dropped:
        raise UsageError(f"run {folder.name} continued without some of its hosts")
    known = [point.step_time for point in points(JournalReader(folder.journal).read())]
    steps = [seconds for seconds in known if seconds is not None]
    if not steps:
        raise UsageError(
            f"run {folder.name} reports no time of its steps",
            hint="call `progress` of dtrain.runtime in each step, for a minute or longer",
        )
    return MeasuredRun(
        name=folder.name,
        layout=job.layout,
        seq_len=training.seq_len,
        precision=next((one for one in PRECISIONS if one == training.precision), "bf16"),
        hosts=len(plan.hosts),
        step_time=median(steps),
        flop_per_token=job.expected.gflop_per_token * 1e9
        if job.expected and job.expected.gflop_per_token
        else None,
    )
