"""A plan as one JSON object, for scripts: ``dtrain plan --json``.

Memory is in GiB, time in seconds, bandwidth in Gb/s, and shares (``mfu``, ``hfu``) go from 0
to 1. ``memory_gib`` and ``time_s`` hold their parts and the ``total``, which is the sum of the
parts. ``memory_interval_gib`` and ``time_interval_s`` contain the peak memory and the step time,
each with a probability of 80 %. Two values of ``memory_gib`` are no parts: ``cached`` are blocks
that the allocator frees if memory is short, and ``limit`` is the share of the GPU's memory that a
layout may use. With trials, the times of ``layouts`` are the estimates times their ``slowdown``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dtrain.parallelism.answer import alternatives, explain
from dtrain.parallelism.answer.remedies import remedies
from dtrain.parallelism.cluster.hardware import GIB
from dtrain.parallelism.cost.candidate import Candidate
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.question import Answer, Question
from dtrain.parallelism.trial import Trial

SCHEMA = 1


def document(answer: Answer, count: int, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the answer with its best ``count`` layouts; see `Answer.shortlist`.

    ``layouts`` is empty if no layout fits. With constraints, it then holds the nearest layout,
    with ``"fits": false``. ``explanation`` is a list of sentences; the first is the
    recommendation.
    """
    question = answer.question
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "model": model(question),
        "cluster": cluster(question),
        "layouts": [layout(answer, candidate) for candidate in answer.shortlist(count)],
        "rejected": [
            {
                "reason": group.reason,
                "count": group.count,
                "example": {**split(group.example), "memory_gib": memory(group.example)},
            }
            for group in answer.plan.rejected
        ],
        "considered": answer.plan.considered,
        "fitting": len(answer.plan.fitting),
        "explanation": _explanation(answer),
        "notes": list(notes),
    }
    if question.probe is not None:
        where = question.cluster
        found["probe"] = {
            "device": question.probe.device,
            "file": question.probe.path,
            "measured": [
                _rounded(asdict(one))
                for one in question.probe.measurements(where.gpu, where.network)
            ],
        }
    if answer.trials:
        found["trials"] = [_trial(one) for one in answer.trials]
    if question.calibration:
        found["calibration"] = [_rounded(asdict(one)) for one in question.calibration]
    if training := answer.training(answer.best) if answer.fits else None:
        found["training"] = _rounded(asdict(training))
    return found


def _explanation(answer: Answer) -> list[str]:
    parts = [
        explain.headline(answer.best),
        explain.fullness(answer.best),
        alternatives.reserve(answer),
    ]
    if answer.fits:
        parts.insert(1, explain.figures(answer.best))
        parts.append(alternatives.other_batch(answer))
    if not answer.question.pinned:
        parts.append(alternatives.textbook(answer))
    return [text for text in (*parts, *remedies(answer)) if text]


def model(question: Question) -> dict[str, Any]:
    """Return the model's shape and its number of parameters."""
    shape = question.shape
    return {
        "name": shape.name or None,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "trained_parameters": shape.trained_parameters,
        **_sizes(shape),
    }


_RARE = (
    "parts", "pattern", "attended", "attends_to_all", "attends_in_chunks", "input_parameters",
    "target_len",
)  # fmt: skip
"""Fields of a shape that few models have."""


def _sizes(shape: Shape) -> dict[str, Any]:
    """Return the fields of a shape. Of a pattern, the kinds of layers and the number of each."""
    absent = {"name", *(name for name in _RARE if not getattr(shape, name))}
    found = {key: value for key, value in asdict(shape).items() if key not in absent}
    if shape.parts:
        found["parts"] = [{"part": type(part).__name__, **asdict(part)} for part in shape.parts]
    if shape.pattern:
        kinds = [{**_sizes(kind), "layers": count} for kind, count in shape.kinds]
        places = {kind: place for place, (kind, _) in enumerate(shape.kinds)}
        found["pattern"] = [places[kind] for kind in shape.pattern]
        found["kinds"] = kinds
    return found


def cluster(question: Question) -> dict[str, Any]:
    """Return the GPUs and links, and their source."""
    where = question.cluster
    return {
        "gpu": where.gpu.name,
        "gpus": where.gpus,
        "hosts": where.hosts,
        "gpus_per_host": where.gpus_per_host,
        "network_gbps": round(where.network * 8, 3),
        "rack_hosts": where.rack_hosts or None,
        "rack_gbps": round(where.between_racks * 8, 3) if where.rack_hosts else None,
        "gpu_memory_gib": where.gpu.memory,
        "peak_tflops": where.gpu.flops[question.precision],
        "source": question.cluster_source or None,
    }


def layout(answer: Answer, candidate: Candidate) -> dict[str, Any]:
    """Return a layout with all its costs."""
    found = {
        **split(candidate),
        "fits": candidate.fits and not answer.ruled_out(candidate),
        "memory_gib": memory(candidate),
        "memory_interval_gib": [_short(gib) for gib in candidate.memory_interval],
        "time_s": _parts(candidate.time, explain.TIME_PARTS),
        "time_interval_s": [_short(seconds) for seconds in candidate.interval],
        **_rounded(asdict(candidate.speed)),
    }
    if candidate.layout.offload:
        host = candidate.hosted
        found["host_memory_gib"] = {
            "pinned": _short(host.pinned),
            "total": _short(host.total),
            "usual": _short(candidate.cluster.host_memory),
        }
    if answer.trials:
        found["slowdown"] = _short(candidate.slowdown)
        found["trained"] = any(one.ok and one.corrected == candidate for one in answer.trials)
    if training := answer.training(candidate):
        found |= {
            "training_days": _short(training.days),
            "training_gpu_hours": _short(training.gpu_hours),
        }
    return found


def _trial(trial: Trial) -> dict[str, Any]:
    """Return a layout with what its trial measured. ``cases`` are the small steps."""
    return {
        **split(trial.planned),
        "cases": [
            _rounded(
                {
                    **asdict(one.case),
                    "predicted_s": trial.small(one.case).time.total,
                    "measured_s": one.seconds,
                    "fastest_s": one.fastest,
                    "allocated_gib": None if one.allocated is None else one.allocated / GIB,
                    "resident_gib": None if one.resident is None else one.resident / GIB,
                }
            )
            for one in trial.measured
        ],
        "predicted_s": _short(trial.planned.time.total),
        "slowdown": _short(trial.slowdown) if trial.ok else None,
        "corrected_s": _short(trial.corrected.time.total) if trial.ok else None,
        "memory_gib": None if trial.memory is None else _short(trial.memory),
        "fits": trial.fits,
        "failure": trial.failure or None,
        "hint": trial.hint or None,
        "run": trial.run or None,
    }


def split(candidate: Candidate) -> dict[str, Any]:
    """Return a layout without its costs."""
    layout = candidate.layout
    names = (
        "tensor", "pipeline", "virtual_pipeline", "schedule", "context", "expert", "data",
        "sharding", "shard", "micro_batch", "grad_accumulation", "global_batch", "recompute",
        "sequence_parallel", "offload",
    )  # fmt: skip
    return {name: getattr(layout, name) for name in names} | {
        "backend": layout.backend,
        "precision": candidate.assumed.precision,
        "state_bits": 16 if candidate.assumed.narrow_states else 32,
    }


def memory(candidate: Candidate) -> dict[str, float]:
    """GiB by part, and what is no part of the total."""
    found = candidate.memory
    others = {"cached": _short(found.cached), "limit": _short(candidate.limit)}
    return {**_parts(found, explain.MEMORY_PARTS), **others}


def _parts(costs: Any, names: Iterable[str]) -> dict[str, float]:
    parts = {name: round(getattr(costs, name), 6) for name in names}
    return {**parts, "total": round(sum(parts.values()), 6)}


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with numbers as in `_short`, and None for infinity."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return _rounded(value)
        if value is None or isinstance(value, str):
            return value
        return _short(value) if math.isfinite(value) else None

    return {key: rounded(value) for key, value in values.items()}


def _short(value: float) -> float:
    """Round to six significant digits; keep whole numbers."""
    return value if isinstance(value, int) else float(f"{value:.6g}")
