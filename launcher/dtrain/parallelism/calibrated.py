"""Learns the speed of a machine from runs on it. Pure.

A run gives one number, the time of a step. The planner splits its estimate into work (computation,
the optimizer, fixed costs) and traffic, and both are multiplied by a factor each, which bring the
estimates of the runs close to the measurements. The fit is a maximum a posteriori estimate of the
logarithms of the factors: how far a machine is from the guess is unknown, but computation and
traffic are probably off by similar factors. So one run moves both factors alike, and they come
apart only as far as the runs show it.

Nine layouts of a small model on CPUs follow this model within 24 % (one is 33 % slower). A third
factor, for the start of a message or a kernel, did not make predictions from two runs better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dtrain.diagnostics import UsageError
from dtrain.parallelism.assumptions import Assumptions
from dtrain.parallelism.cluster.efficiency import Efficiency
from dtrain.parallelism.cluster.hardware import Precision
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.cost.speed import flop_per_token
from dtrain.parallelism.question import Question, RunError
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout

ROUNDS = 20
"""Newton steps, each from the estimates of the one before: traffic that computation hides is not
linear."""
STEP, DAMPING = 2.0, 0.6
"""Most that one of them changes the logarithm of a factor, and the part of it that is used: it may
pass a kink, where traffic begins to show."""
NOISE = 0.3
"""Standard deviation of the logarithm of a measured step over its estimate with the best factors:
the planner's error, and noise of the machine."""
COMMON = 1.5
"""Standard deviation of the mean of both logarithms, before any run is known."""
APART = 1.4
"""Standard deviation of the difference of both logarithms, before any run is known."""
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
    fitted = _fitted(question, runs)
    errors = []
    for run in runs:
        others = [one for one in runs if one is not run]
        before, after, unseen = (
            _candidate(one, run).time.total
            for one in (question, fitted, _fitted(question, others) if others else fitted)
        )
        errors.append(RunError(run.name, run.step_time, before, after, unseen if others else None))
    return replace(fitted, calibration=tuple(errors))


def _fitted(question: Question, runs: Sequence[MeasuredRun]) -> Question:
    work = traffic = 0.0
    fitted = question
    for _ in range(ROUNDS):
        parts = []
        for run in runs:
            time = _candidate(fitted, run).time
            sent = math.fsum(getattr(time, name) for name in _TRAFFIC)
            parts.append((sent / time.total, math.log(run.step_time / time.total)))
        more, further = _step(parts, work, traffic)
        work, traffic = work + more, traffic + further
        fitted = replace(
            question, efficiency=_slower(question.efficiency, math.exp(work), math.exp(traffic))
        )
    return fitted


def _candidate(question: Question, run: MeasuredRun) -> Candidate:
    """The estimate for a run."""
    gpus = run.layout.world_size
    cluster = replace(question.cluster, gpus=gpus, gpus_per_host=max(1, gpus // run.hosts))
    shape = replace(question.shape, seq_len=run.seq_len)
    assumed = Assumptions.usual(run.precision, cluster.gpu, run.layout.backend)
    return Candidate(shape, run.layout, cluster, question.efficiency, assumed)


def _step(parts: Sequence[tuple[float, float]], work: float, traffic: float) -> tuple[float, float]:
    """What to add to ``work`` and ``traffic``, the logarithms of the factors.

    ``parts`` are the share of traffic in the estimate for each run, and the logarithm of its
    measured time over this estimate.
    """
    # The normal equations of linear least squares, with the two priors as further observations.
    rows = [
        *((1 - share, share, missing) for share, missing in parts),
        *(
            (NOISE / deviation * one, NOISE / deviation * two, -NOISE / deviation * now)
            for deviation, one, two, now in (
                (COMMON, 0.5, 0.5, (work + traffic) / 2),
                (APART, -1.0, 1.0, traffic - work),
            )
        ),
    ]
    aa = math.fsum(one * one for one, _, _ in rows)
    ab = math.fsum(one * two for one, two, _ in rows)
    bb = math.fsum(two * two for _, two, _ in rows)
    a = math.fsum(one * wanted for one, _, wanted in rows)
    b = math.fsum(two * wanted for _, two, wanted in rows)
    determinant = aa * bb - ab * ab
    more, further = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    shorter = DAMPING * STEP / max(STEP, abs(more), abs(further))
    return more * shorter, further * shorter


def _slower(before: Efficiency, work: float, traffic: float) -> Efficiency:
    """Constants with which work and traffic take these times as long."""
    return replace(
        before,
        gemm=before.gemm / work,
        attention=before.attention / work,
        stream=before.stream / work,
        launch=before.launch * work,
        gap=before.gap * work,
        fixed=before.fixed * work,
        link=before.link / traffic,
        network=before.network / traffic,
        latency=before.latency * traffic,
        link_step=before.link_step * traffic,
        network_step=before.network_step * traffic,
    )
