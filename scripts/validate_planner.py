#!/usr/bin/env python3
"""Compares the planner's estimates with published training runs.

    scripts/validate_planner.py [--runs FILE [--runs FILE ...] | --all] [--json] [--worst N]
                                [--rows OUT]

Estimates every run of the files like ``dtrain plan``, without any calibration. Prints for each
source, each file and all of them: rows, mean absolute and signed error of the step time and of the
peak memory in percent, and how well the planner predicted which runs fit. A further line has the
runs whose layout and batch are given: ``planner.published.layouts.is_given`` says what that means.
``planner.published.runs`` describes how a row is read. Without --runs, uses the runs in this
repository that the constants are fitted to: all but published_runs_unseen.csv and
published_runs_unseen_2.csv to _15.csv. With --all, uses those too: this prints today's figures of
``dtrain help accuracy``, without those of held-out publishers (``planner/fit.py --held-out``).

A run's error is estimate / measured − 1: above 0, the planner's estimate is slower or larger.
"Fits" is the planner's decision, so it includes the headroom that the planner leaves.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster.efficiency import KNOWN, of_gpu
from dtrain.parallelism.cost.candidate import ROOMY
from dtrain.parallelism.search import rank_key
from planner.interval import described_interval
from planner.published.runs import PublishedRun, Skipped, read

DATA = Path(__file__).resolve().parent.parent / "tests" / "parallelism" / "data"
RUNS = (DATA / "published_runs.csv", DATA / "published_runs_single_node.csv")
UNSEEN = {
    test: DATA / f"published_runs_unseen{f'_{test}' if test > 1 else ''}.csv"
    for test in range(1, 16)
}
"""The runs of each blind test, which the data of the earlier ones and the fit did not have."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run, and the planner's errors on it, relative to the measured values."""

    run: PublishedRun
    seconds: float
    """Estimated seconds of a step."""
    gib: float
    """Estimated peak memory, of the kind that the run reports."""
    fits: bool
    rank_key: float
    """What the planner ranks layouts by, the least first."""
    share: float
    """Estimated share of the GPU's memory."""

    @property
    def time(self) -> float | None:
        return None if self.run.seconds is None else self.seconds / self.run.seconds - 1

    @property
    def memory(self) -> float | None:
        return None if self.run.memory is None else self.gib / self.run.memory - 1


@dataclass(slots=True)
class Score:
    """Statistics of a set of outcomes."""

    rows: int = 0
    time: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    fit: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.rows += 1
        if outcome.time is not None:
            self.time.append(outcome.time)
        if outcome.memory is not None:
            self.memory.append(outcome.memory)
        if outcome.run.fitted is not None:
            # true or false: whether the prediction was right. fit or oom: the prediction.
            right = outcome.fits == outcome.run.fitted
            self.fit[f"{'true' if right else 'false'}_{'fit' if outcome.fits else 'oom'}"] += 1

    def as_json(self) -> dict[str, Any]:
        fits = ("true_fit", "false_fit", "true_oom", "false_oom")
        return {
            "step_time": _errors(self.time),
            "memory": _errors(self.memory),
            "fit": {name: self.fit[name] for name in fits},
        }


def _errors(errors: Sequence[float]) -> dict[str, float | int | None]:
    rows = len(errors)
    mape = 100 * sum(map(abs, errors)) / rows if rows else None
    bias = 100 * sum(errors) / rows if rows else None
    return {
        "rows": rows,
        "mape": None if mape is None else round(mape, 3),
        "bias": None if bias is None else round(bias, 3),
    }


def outcome_of(run: PublishedRun) -> Outcome | Skipped:
    """The planner's estimate of a run, or why it has none."""
    efficiency = of_gpu(run.cluster.gpu)
    candidate = run.candidate(efficiency)
    try:
        seconds, memory, fits = candidate.time.total, candidate.memory, run.fits(efficiency)
    except (ArithmeticError, LookupError, TypeError, ValueError, UsageError) as error:
        return Skipped(run.name, f"the planner has no estimate: {type(error).__name__}")
    peak = {
        "allocated": memory.allocated,
        "reserved": memory.allocated + memory.fragmentation + memory.cached,
        "total": memory.total + memory.cached,
    }[run.counter]
    if run.counter != "allocated":
        # The allocator frees cached blocks when the GPU is full.
        peak -= min(memory.cached, max(0.0, memory.total + memory.cached - run.cluster.gpu.memory))
    if not (math.isfinite(seconds) and math.isfinite(peak)):
        return Skipped(run.name, "the planner has no estimate: not finite")
    share = memory.total / run.cluster.gpu.memory
    return Outcome(run, seconds, peak, fits, rank_key(candidate), share)


@dataclass(slots=True)
class Report:
    overall: Score = field(default_factory=Score)
    given: Score = field(default_factory=Score)
    """Of the runs whose layout and batch their rows give (`PublishedRun.given`)."""
    sources: dict[str, Score] = field(default_factory=dict)
    files: dict[str, Score] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    outcomes: list[Outcome | Skipped] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "overall": self.overall.as_json(),
            "given": self.given.as_json(),
            "files": {name: score.as_json() for name, score in self.files.items()},
            "sources": {name: score.as_json() for name, score in sorted(self.sources.items())},
            "skipped": dict(sorted(self.skipped.items())),
        }

    @property
    def estimated(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Outcome)]


def validate(files: Iterable[tuple[str, Iterable[PublishedRun | Skipped]]]) -> Report:
    """The planner's errors on the runs of some files, each with a name."""
    report = Report()
    for name, runs in files:
        of_file = report.files.setdefault(name, Score())
        for run in runs:
            outcome = run if isinstance(run, Skipped) else outcome_of(run)
            report.outcomes.append(outcome)
            if isinstance(outcome, Skipped):
                report.skipped[outcome.reason] += 1
                continue
            of_source = report.sources.setdefault(outcome.run.table, Score())
            for score in (report.overall, of_file, of_source):
                score.add(outcome)
            if outcome.run.given:
                report.given.add(outcome)
    return report


_HEADINGS = ("rows", "time", "error", "bias", "memory", "error", "bias", "ran", "oom")


def table(report: Report) -> str:
    """A text table, aligned in any terminal or file."""
    lines: list[tuple[str, ...]] = [("", *_HEADINGS)]
    lines += [(name, *_cells(score)) for name, score in sorted(report.sources.items())]
    sources = len(lines)
    lines += [(name, *_cells(score)) for name, score in report.files.items()]
    lines.append(("layout and batch given", *_cells(report.given)))
    lines.append(("all", *_cells(report.overall)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([line[0].ljust(widths[0])]
                  + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)])
        for line in lines
    ]  # fmt: skip
    rule = "─" * len(text[0])
    text = [text[0], rule, *text[1:sources], rule, *text[sources:], ""]
    text.append("time, memory: runs compared; errors in percent: mean of absolute ones, and bias")
    text.append("ran, oom: of the runs that ran and that did not fit, those predicted correctly")
    text += [f"{line}." for line in (*_intervals(report), *_sweeps(report), *_near_limit(report))]
    if report.skipped:
        text += ["", f"{sum(report.skipped.values())} rows skipped:"]
        text += [f"  {rows:5}  {reason}" for reason, rows in report.skipped.most_common()]
    return "\n".join(text)


def _intervals(report: Report) -> Iterator[str]:
    """The intervals of the errors, of all runs and of the groups that the planner distinguishes."""

    def is_measured(run: PublishedRun) -> bool:
        return of_gpu(run.cluster.gpu).interval_high == KNOWN["interval_high"]

    def is_mixture(run: PublishedRun) -> bool:
        return run.shape.experts > 0

    groups: tuple[tuple[str, str, Callable[[PublishedRun], bool]], ...] = (
        ("step times", "time", lambda _: True),
        (
            "step times of dense models on measured GPUs",
            "time",
            lambda run: is_measured(run) and not is_mixture(run),
        ),
        (
            "step times of dense models on other GPUs",
            "time",
            lambda run: not is_measured(run) and not is_mixture(run),
        ),
        ("step times of models with experts", "time", is_mixture),
        ("memory peaks", "memory", lambda _: True),
        ("memory peaks of Megatron-LM", "memory", lambda run: run.layout.backend == "megatron"),
        ("memory peaks of PyTorch", "memory", lambda run: run.layout.backend != "megatron"),
    )
    for what, measured, chosen in groups:
        errors: dict[tuple[str, str], list[float]] = {}
        for outcome in report.estimated:
            run, error = outcome.run, getattr(outcome, measured)
            if error is not None and chosen(run):
                errors.setdefault((run.publisher, run.table), []).append(math.log1p(error))
        if errors:
            yield described_interval(errors, what)


def _sweeps(report: Report) -> Iterator[str]:
    every = sweeps(report)
    if losses := first_choice_losses(report):
        plain = [_loss(sweep, lambda outcome: outcome.seconds) for sweep in every]
        close = sum(loss <= 0.03 for loss in losses)
        yield (
            f"In {len(losses)} sweeps of three or more layouts, the planner's first choice took "
            f"{100 * fmean(losses):.1f} % longer than the fastest, and within 3 % in {close}; "
            f"by the estimate alone, {100 * fmean(plain):.1f} %"
        )
        pairs = [
            abs(math.log1p(one.time or 0.0) - math.log1p(other.time or 0.0))
            for sweep in every
            for one, other in combinations(sweep, 2)
            if one.run.layout != other.run.layout
        ]
        yield f"In half of {len(pairs)} pairs, their errors differ by {100 * median(pairs):.1f} %"


def _near_limit(report: Report) -> Iterator[str]:
    for low, high in ((0.85, ROOMY), (ROOMY, 1.0)):
        failed, runs = ran_out(report, low, high)
        if runs:
            yield (
                f"Of {runs} runs estimated at {100 * low:.0f} to {100 * high:.0f} % of the "
                f"memory, {failed} ran out of it"
            )


def ran_out(report: Report, low: float, high: float) -> tuple[int, int]:
    """How many runs ran out of memory, of how many whose estimate is from ``low`` to below ``high``
    of it."""
    near = [
        outcome.run.fitted
        for outcome in report.estimated
        if outcome.run.fitted is not None and low <= outcome.share < high
    ]
    return near.count(False), len(near)


def sweeps(report: Report) -> list[list[Outcome]]:
    """Measured runs of three or more layouts of one model and batch on the same GPUs."""
    found: dict[object, list[Outcome]] = {}
    for outcome in report.estimated:
        if outcome.run.seconds is not None:
            run = outcome.run
            batch, precision = run.layout.global_batch, run.assumed.precision
            key = (run.publisher, run.table, run.shape, run.cluster, batch, precision)
            found.setdefault(key, []).append(outcome)
    return [sweep for sweep in found.values() if len({one.run.layout for one in sweep}) >= 3]


def first_choice_losses(report: Report) -> list[float]:
    """For each sweep: how much longer than the fastest layout the one took that ranks first, as a
    share."""
    return [_loss(sweep, lambda outcome: outcome.rank_key) for sweep in sweeps(report)]


def _loss(sweep: Sequence[Outcome], key: Callable[[Outcome], float]) -> float:
    measured = [outcome.run.seconds or 0.0 for outcome in sweep]
    return (min(sweep, key=key).run.seconds or 0.0) / min(measured) - 1


def _cells(score: Score) -> tuple[str, ...]:
    cells = [str(score.rows)]
    for errors in (score.time, score.memory):
        found = _errors(errors)
        mape, bias = found["mape"], found["bias"]
        cells += ["–", "–", "–"] if mape is None or bias is None else [
            str(len(errors)), f"{mape:.1f}", f"{bias:+.1f}"]  # fmt: skip
    fit = score.fit
    ran, oom = fit["true_fit"] + fit["false_oom"], fit["true_oom"] + fit["false_fit"]
    cells.append(f"{fit['true_fit']}/{ran}" if ran else "–")
    cells.append(f"{fit['true_oom']}/{oom}" if oom else "–")
    return tuple(cells)


def worst(report: Report, number: int) -> str:
    """The runs with the largest errors of either kind, one per line."""
    found = [
        (error, what, outcome.run)
        for outcome in report.estimated
        for what, error in (("time", outcome.time), ("memory", outcome.memory))
        if error is not None
    ]
    found.sort(key=lambda one: -abs(one[0]))
    lines = [f"{100 * error:+7.1f} %  {what:6}  {run.name}" for error, what, run in found[:number]]
    wrong = [o.run.name for o in report.estimated if o.run.fitted is False and o.fits]
    return "\n".join([*lines, *(f" ran out of memory, called a fit: {name}" for name in wrong)])


def write_rows(report: Report, path: Path) -> None:
    """Write a CSV file with a line for each row: estimated and measured figures.

    Raises:
        UsageError: the file cannot be written.
    """
    names = ("id", "seconds", "measured_seconds", "gib", "measured_gib", "fits", "ran", "skipped")
    try:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            for outcome in report.outcomes:
                if isinstance(outcome, Skipped):
                    writer.writerow([outcome.name, *[""] * 6, outcome.reason])
                    continue
                run = outcome.run
                writer.writerow([
                    run.name, f"{outcome.seconds:.6g}", run.seconds, f"{outcome.gib:.6g}",
                    run.memory, outcome.fits, run.fitted, "",
                ])  # fmt: skip
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="choose another file for --rows"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--runs", action="append", type=Path, metavar="FILE")
    files.add_argument("--all", action="store_true", help="all runs of this repository")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="list the N worst runs")
    parser.add_argument(
        "--rows", type=Path, metavar="OUT", help="write a line for each row, as CSV"
    )
    options = parser.parse_args(arguments)
    try:
        paths = options.runs or (*RUNS, *(UNSEEN.values() if options.all else ()))
        report = validate((path.stem, read(path)) for path in paths)
        if options.rows:
            write_rows(report, options.rows)
    except UsageError as error:
        print(f"error: {error.message}\n  hint: {error.hint}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        print(table(report))
        if options.worst > 0:
            print("", worst(report, options.worst), sep="\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
    sys.exit(main())
