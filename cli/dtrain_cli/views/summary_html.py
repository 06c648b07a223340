"""A run as one self-contained HTML page: `dtrain report --html`.

Long runs are thinned: the page of a week on 1,024 GPUs stays below 5 MB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby, pairwise
from operator import itemgetter
from statistics import median
from typing import Any

from dtrain.failures.traceback import shorten
from dtrain.hostlist import in_order
from dtrain.messages.telemetry import Sample
from dtrain.runs.goodput import CLASSES, AttemptTime
from dtrain.runs.summary import Summary
from dtrain.runs.telemetry import PERIOD
from dtrain_cli.views import names
from dtrain_cli.views.html import percent, rendered
from dtrain_cli.views.summary import (
    TITLES,
    attempt_row,
    difference_row,
    facts,
    slow_ranks,
    spans,
)

BUCKETS = 300
"""Parts of a curve; each has two points, its least and its greatest value."""
BINS = 120
"""Parts of a row of the heat map."""
LEVELS = 5
"""Shades of the heat map."""
ROWS = 24
"""Rows of the table of a curve."""
MOST_HOSTS = 512
MOST_ATTEMPTS = 200
TRACEBACK = 200
"""Lines of a traceback."""
FILE = 1 << 16
"""Characters of the cluster file."""

Points = Sequence[tuple[float, float]]
"""Times in seconds since the start of the run, each with a value."""


def page(run: Summary) -> str:
    """Return the document."""
    length = max(run.until - run.began, 1e-3)
    attempts = run.goodput.attempts[-MOST_ATTEMPTS:]
    return rendered(
        "run.html",
        ("layouts.css", "run.css"),
        title=run.record.run,
        state=run.state,
        facts=facts(run)[1:],  # the title is the run's name
        cause=_cause(run),
        goodput=_goodput(run),
        timeline=[_attempt(one, run, length) for one in attempts],
        legend=[
            {"color": color(name), "title": TITLES[name]}
            for name in CLASSES
            if any(part.what == name for one in attempts for part in one.segments)
        ],
        ticks=_ticks(length),
        attempts=[attempt_row(one, run) for one in attempts],
        events=[(f"+{names.spent(one.time - run.began)}", one.text) for one in run.events],
        curves=[one for one in _curves(run, length) if one],
        heat=_heat(run, length),
        slow=slow_ranks(run)[-20:],
        differences=[difference_row(one) for one in run.differences],
        differs=run.differs,
        file=run.record.request.text[:FILE].splitlines(),
        args=" ".join(run.record.request.args),
        settings=", ".join(run.record.request.settings),
    )


def color(name: str) -> str:
    """The class of a color of the style sheet for a class of time."""
    # Neighbors differ: steps, the most common class, is a calm color.
    order = ("save", "data", "lost", "other", "steps", "start", "waiting", "load", "hung")
    return f"c{order.index(name)}"


def _cause(run: Summary) -> dict[str, Any] | None:
    """The first cause of a failure."""
    report = run.report
    if report is None or report.ok:
        return None
    first = report.failures[0] if report.failures else None
    traceback = shorten(first.traceback.strip("\n")).split("\n")[-TRACEBACK:] if first else []
    return {
        "title": "First cause" if run.ended is not None else "First cause of the last failure",
        "headline": report.reason,
        "message": first.message if first else "",
        "traceback": traceback if any(traceback) else [],
        "problems": list(report.problems[:20]),
        "hint": report.hint.split("\n") if report.hint else [],
        "others": len(report.failures) - (first is not None and report.reason == first.summary),
    }


def _goodput(run: Summary) -> list[dict[str, Any]]:
    """A part of the bar for each class of time."""
    colors = {TITLES[name]: color(name) for name in CLASSES}
    parts, before = [], 0.0
    for title, seconds, of in spans(run):
        parts.append(
            {
                "title": title,
                "color": colors[title],
                "time": names.spent(seconds),
                "share": f"{of * 100:.1f} %",
                "seconds": f"{seconds:.6g}",
                "x": percent(before),
                "width": percent(of),
            }
        )
        before += of
    return parts


def _attempt(one: AttemptTime, run: Summary, length: float) -> dict[str, Any]:
    began = run.began
    segments = []
    for what, group in groupby(one.segments, key=lambda part: part.what):
        parts = list(group)
        begin, end = parts[0].begin, parts[-1].end
        if (end - begin) / length < 2e-4 and len(one.segments) > BUCKETS:
            continue  # too short to be seen
        lasted = names.spent(end - begin)
        segments.append(
            {
                "x": percent((begin - began) / length),
                "width": percent((end - begin) / length),
                "color": color(what),
                "title": f"{TITLES[what]}: {lasted} from +{names.spent(begin - began)}",
            }
        )
    # Only a run that has failed has a next attempt.
    ends = run.state if one is run.goodput.attempts[-1] else "failed"
    number, begun, lasted, steps, why = attempt_row(one, run)
    return {
        "number": number,
        "segments": segments[: 4 * BUCKETS],
        "mark": ends,
        "over": percent((one.over - began) / length),
        "description": (
            f"attempt {number}, {begun}, lasted {lasted}, steps {steps or 'none'}: {why}"
        ),
    }


def _curves(run: Summary, length: float) -> Iterable[dict[str, Any] | None]:
    def of_job(value: Callable[[Any], float | None]) -> Points:
        return [
            (point.time - run.began, found)
            for point in run.curve
            if (found := value(point)) is not None and math.isfinite(found)
        ]

    yield _curve("Loss", "", length, of_job(lambda point: point.loss))
    yield _curve("Tokens per second", "", length, of_job(lambda point: point.tokens_per_second))
    yield _curve("Time of a step", "s", length, of_job(lambda point: point.step_time))
    gpus: list[tuple[float, float]] = []
    hosts: list[tuple[float, float]] = []
    for samples in run.samples.values():
        for sample in samples:
            used = [gpu.memory_used for gpu in sample.gpus if gpu.memory_used is not None]
            if used:
                gpus += [(sample.time - run.began, of(used) / 1024) for of in (min, max)]
            elif sample.memory is not None:
                hosts.append((sample.time - run.began, sample.memory[0] / 2**30))
    what, values = ("GPUs", gpus) if gpus else ("hosts", hosts)
    title = f"Memory of {what}, least and most"
    yield _curve(title, "GiB", length, *_extremes(values, length))


def _extremes(values: Points, length: float) -> tuple[Points, Points]:
    """The least and the greatest values of all hosts over time. Each part of the time has at least
    one sample of each host."""
    least, most = [], []
    step = max(2 * PERIOD, length / BINS)
    for _, group in groupby(sorted(values), key=lambda one: one[0] // step):
        times, found = zip(*group, strict=True)
        at = (times[0] + times[-1]) / 2  # a short run ends within the first part
        least.append((at, min(found)))
        most.append((at, max(found)))
    return least, most


def _curve(title: str, unit: str, length: float, *series: Points) -> dict[str, Any] | None:
    """One or more lines in one chart; None if they have no points."""
    values = sorted(chain(*series), key=itemgetter(0))
    if not values:
        return None
    low, high = min(value for _, value in values), max(value for _, value in values)
    bottom = 0.0 if low >= 0 else low
    span = (high / 2 - bottom / 2) or 1.0  # halves: the whole may be more than a float can be

    def path(points: Points) -> str:
        places = [
            (min(max(at / length, 0), 1) * 1000, 100 - (value / 2 - bottom / 2) / span * 100)
            for at, value in (points if len(points) > 1 else [*points] * 2)
        ]
        return " ".join(f"{x:.1f},{y:.2f}" for x, y in places)

    thinned = _thinned(values, length)
    every = max(1, len(thinned) // ROWS)
    unit = f" {unit}" if unit else ""
    return {
        "title": title,
        "paths": [path(_thinned(points, length)) for points in series],
        "dot": len(series[0]) == 1,
        "high": f"{_amount(high)}{unit}",
        "low": _amount(bottom),
        "description": f"{title}: from {_amount(values[0][1])} to {_amount(values[-1][1])}{unit}, "
        f"least {_amount(low)}, most {_amount(high)}",
        "rows": [(f"+{names.spent(at)}", _amount(value)) for at, value in thinned[::every]],
        "head": ("time", f"{title.lower()}{f', {unit.strip()}' if unit else ''}"),
    }


def _thinned(values: Points, length: float) -> Points:
    thinned: list[tuple[float, float]] = []
    for _, group in groupby(values, key=lambda one: int(one[0] / length * BUCKETS)):
        parts = list(group)
        value = itemgetter(1)
        ends = {parts.index(min(parts, key=value)), parts.index(max(parts, key=value))}
        thinned += [parts[place] for place in sorted(ends)]
    return thinned


def _amount(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def _heat(run: Summary, length: float) -> dict[str, Any] | None:
    """Use of GPUs, or of CPUs if no host has a GPU, by host over time."""
    with_gpus = any(sample.gpus for samples in run.samples.values() for sample in samples)
    use = _gpu_use if with_gpus else _cpu_use
    rows = []
    for host in in_order(run.samples)[:MOST_HOSTS]:
        bins: dict[int, list[float]] = {}
        for begin, end, sample in _covered(run.samples[host]):
            value = use(sample)
            first, last = ((at - run.began) / length * BINS for at in (begin, end))
            if value is not None and last > 0 and first <= BINS:
                for place in range(
                    max(0, int(first)), min(BINS, max(math.ceil(last), int(first) + 1))
                ):
                    bins.setdefault(place, []).append(value)
        if bins:
            rows.append(_heat_row(host, bins))
    if not rows:
        return None
    return {"what": "GPUs" if with_gpus else "CPUs", "rows": rows, "levels": range(LEVELS + 1)}


def _covered(samples: Sequence[Sample]) -> Iterable[tuple[float, float, Sample]]:
    """Each sample with the begin and the end of its time. A host may have been away between two."""
    times = [sample.time for sample in samples]
    between = [after - before for before, after in pairwise(times)]
    usual = max(PERIOD, median(between)) if between else PERIOD
    for sample, after in zip(samples, [*times[1:], math.inf], strict=True):
        yield sample.time, min(sample.time + usual, max(after, sample.time)), sample


def _heat_row(host: str, bins: dict[int, list[float]]) -> dict[str, Any]:
    means = {place: sum(values) / len(values) for place, values in bins.items()}
    cells = []
    levels = [(place, min(LEVELS, int(means[place] * LEVELS + 0.5))) for place in sorted(means)]
    # Equal neighbors are one rectangle.
    for _, group in groupby(enumerate(levels), key=lambda one: (one[1][1], one[1][0] - one[0])):
        parts = [one for _, one in group]
        first, level = parts[0]
        cells.append(
            {"x": percent(first / BINS), "width": percent(len(parts) / BINS), "level": level}
        )
    everything = [value for values in bins.values() for value in values]
    mean = sum(everything) / len(everything)
    return {
        "host": host,
        "cells": cells,
        "mean": f"{mean * 100:.0f} %",
        "least": f"{min(means.values()) * 100:.0f} %",
    }


def _gpu_use(sample: Sample) -> float | None:
    used = [gpu.use for gpu in sample.gpus if gpu.use is not None]
    return min(1.0, sum(used) / len(used) / 100) if used else None


def _cpu_use(sample: Sample) -> float | None:
    return min(1.0, sample.cpu / sample.cpus) if sample.cpus and sample.cpu is not None else None


def _ticks(length: float) -> list[dict[str, str]]:
    """Three times along an axis."""
    return [
        {
            "x": percent(part / 2),
            "anchor": ("start", "middle", "end")[part],
            "text": f"+{names.spent(length * part / 2)}",
        }
        for part in range(3)
    ]
