"""Plans with measurements of the cluster's own machines: ``dtrain plan FILE --probe``."""

from __future__ import annotations

from dataclasses import replace

from dtrain.diagnostics import UsageError
from dtrain.loading import load
from dtrain.parallelism.cluster.efficiency import of_family
from dtrain.parallelism.cluster.probe import Probe
from dtrain.parallelism.question import Question
from dtrain.plan_request import PlanRequest
from dtrain.runs.probes import store
from dtrain.runs.record import Request


def measurable(request: PlanRequest) -> Request:
    """Return the cluster file of a request, whose machines can be measured. Raises UsageError."""
    if request.file is None:
        raise UsageError("`probe` measures machines, but no file names them", hint="add FILE")
    if request.calibrate is not None:
        raise UsageError("`probe` and `calibrate` are both measurements", hint="keep one of them")
    found = load(request.file)
    file = found.spec()
    if file.cluster.allocated:
        raise UsageError(
            "`probe` needs hosts by name, but an engine chooses them",
            hint="use `calibrate_run` with a run on them, or a copy of the file with cluster.hosts",
        )
    if file.job.framework != "torch":
        raise UsageError(
            f"`probe` measures with torch, but job.framework is {file.job.framework}",
            hint="leave it out",
        )
    if file.job.container is not None:
        raise UsageError(
            "`probe` does not measure in containers",
            hint="use `calibrate_run` with a run in them, or a copy of the file without "
            "job.container",
        )
    return found


def stored(question: Question, probe: Probe) -> Question:
    """Store the measurements. Return the question with the name of their file."""
    gpu = question.cluster.gpu
    name = f"{gpu.name}-x{question.cluster.gpus}"
    path = store(name, probe.calibration(gpu, of_family(gpu.family)))
    if probe.is_cpu:
        store(f"{name}-hardware", probe.hardware(gpu))
    return replace(question, probe=replace(probe, path=str(path)))
