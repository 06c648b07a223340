"""The planner's question, with what is known of the machines: from an engine, from measurements
(``dtrain plan FILE --probe``), and from earlier runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dtrain.diagnostics import UsageError
from dtrain.loading import load_torch_hosts
from dtrain.parallelism.cluster.efficiency import of_gpu
from dtrain.parallelism.cluster.probe import Probe
from dtrain.parallelism.question import Question
from dtrain.planning.question import pose
from dtrain.planning.request import PlanRequest, QueueGpus

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtrain.runs.request import Request
    from dtrain.spec.model import ClusterFile
    from dtrain.transport.questions import Ask


def posed(request: PlanRequest, ask: Ask | None, on_notice: Callable[[str], None]) -> Question:
    """Return the question of a request. ``ask`` asks a person. Raises as `dtrain.api.plan`."""

    def ask_engine(spec: ClusterFile) -> QueueGpus:
        from dtrain.engines.inspection import queue_gpus

        return queue_gpus(spec, request.file, ask)

    probe = None
    if request.probe:
        from dtrain.checks.probe import probe as slowest
        from dtrain.engines.inspection import examine

        probe = slowest(
            examine(measurable(request), bandwidth=True, compute=True, ask=ask, on_notice=on_notice)
        )
    question = pose(request, ask_engine, probe)
    if probe is not None:
        question = stored(question, probe)
    if request.calibrate_runs:
        from dtrain.runs.calibration import learned

        question = learned(question, request.calibrate_runs)
    return question


def measurable(request: PlanRequest) -> Request:
    """Return the cluster file of a request, whose machines can be measured. Raises UsageError."""
    if request.calibrate is not None:
        raise UsageError("`probe` and `calibrate` are both measurements", hint="keep one of them")
    return load_torch_hosts(request.file, request.settings, "probe", "measure")


def stored(question: Question, probe: Probe) -> Question:
    """Store the measurements. Return the question with the name of their file."""
    from dtrain.runs.probes import store

    gpu = question.cluster.gpu
    name = f"{gpu.name}-x{question.cluster.gpus}"
    path = store(name, probe.calibration(gpu, of_gpu(gpu)))
    if probe.is_cpu:
        store(f"{name}-hardware", probe.hardware(gpu))
    return replace(question, probe=replace(probe, path=str(path)))
