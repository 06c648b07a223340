"""Learns the speed of a machine from runs on it. Pure.

A run gives one number, the time of a step. The planner splits its estimate into work (computation,
the optimizer, fixed costs) and traffic, and both are multiplied by a factor each, which make the
estimates of the runs equal to the measurements. One run cannot tell both apart: they get the same
factor. With more runs, the factors are a least-squares fit of relative errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtrain.diagnostics import UsageError
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import Precision
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.question import Question, RunError
from dtrain.runtime.layout import Layout

ROUNDS = 5
"""Fits, each from the estimates of the one before: traffic that computation hides is not linear."""
EQUAL = 0.1
"""Weight of the difference of both factors, relative to the errors of the runs. Noise of
10 % must not turn a small share of traffic into a large factor."""
_TRAFFIC = ("tensor", "context", "expert", "pipeline", "data")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    name: str
    layout: Layout
    seq_len: int
    precision: Precision
    hosts: int
    step_time: float
    """Seconds."""
    flop_per_token: float | None = None
    """Of its model, if its plan recorded it."""


def calibrated(question: Question, runs: Sequence[MeasuredRun]) -> Question:
    """Return the question with the speed that the runs had, and with the errors for them.

    Raises UsageError if a run trained another model.
    """
    for run in runs:
        if run.flop_per_token is not None:
            shape = replace(question.shape, seq_len=run.seq_len)
            here, there = flop_per_token(shape) / 1e9, run.flop_per_token / 1e9
            if not 0.99 < here / there < 1.01:
                raise UsageError(
                    f"run {run.name} trained another model: {there:.4g} GFLOP for a token, and "
                    f"{here:.4g} here",
                    hint="name the model of that run",
                )
    before = [_candidate(question, run).time.total for run in runs]
    fitted = question
    for _ in range(ROUNDS):
        parts = []
        for run in runs:
            time = _candidate(fitted, run).time
            traffic = math.fsum(getattr(time, name) for name in _TRAFFIC)
            parts.append((time.total - traffic, traffic, run.step_time))
        fitted = replace(fitted, efficiency=_slower(fitted.efficiency, *_factors(parts)))
    after = [_candidate(fitted, run).time.total for run in runs]
    errors = (
        RunError(run.name, run.step_time, first, last)
        for run, first, last in zip(runs, before, after, strict=True)
    )
    return replace(fitted, calibration=tuple(errors))


def _candidate(question: Question, run: MeasuredRun) -> Candidate:
    """The estimate for a run."""
    gpus = run.layout.world_size
    cluster = replace(question.cluster, gpus=gpus, gpus_per_host=max(1, gpus // run.hosts))
    shape = replace(question.shape, seq_len=run.seq_len)
    assumed = Assumptions.usual(run.precision)
    return Candidate(shape, run.layout, cluster, question.efficiency, assumed)


def _factors(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Factors of work and traffic, from the work, the traffic and the measured time of each run."""
    rows = [(work / time, traffic / time) for work, traffic, time in parts]
    totals = [work + traffic for work, traffic in rows]
    same = math.fsum(totals) / math.fsum(one**2 for one in totals)
    # Solve (A^T A + w I) x = A^T 1 + w x0, where x0 has the same factor for both.
    weight = EQUAL / same**2
    aa = math.fsum(work**2 for work, _ in rows) + weight
    bb = math.fsum(traffic**2 for _, traffic in rows) + weight
    ab = math.fsum(work * traffic for work, traffic in rows)
    a = math.fsum(work for work, _ in rows) + weight * same
    b = math.fsum(traffic for _, traffic in rows) + weight * same
    determinant = aa * bb - ab * ab
    work_factor = (a * bb - b * ab) / determinant
    traffic_factor = (b * aa - a * ab) / determinant
    if min(work_factor, traffic_factor) <= 0:
        return same, same
    return work_factor, traffic_factor


def _slower(before: Efficiency, work: float, traffic: float) -> Efficiency:
    """Constants with which work and traffic take these times as long."""
    return replace(
        before,
        gemm=before.gemm / work,
        attention=before.attention / work,
        stream=before.stream / work,
        launch=before.launch * work,
        fixed=before.fixed * work,
        link=before.link / traffic,
        network=before.network / traffic,
        latency=before.latency * traffic,
        hop=before.hop * traffic,
    )
