#!/usr/bin/env python3
"""Fits the planner's constants to published training runs, and tests them on held-out runs.

    scripts/planner/fit.py [--runs FILE ...] [--architecture NAME]             the constants
    scripts/planner/fit.py [--runs FILE ...] [--architecture NAME] --held-out  their error

The constants of ``dtrain.parallelism.cluster.efficiency`` in ``FREE`` are fitted, separately for
each architecture, to the step times of the runs on its GPUs. The other constants (``fp8``,
``gemm_half``, ``exposed_tensor`` ...) keep the values in that module: some are measurements, others
were chosen by hand with all of these runs in view.

The fit minimizes the mean over publishers of the mean over their tables of each table's mean
absolute error plus 0.3 of its bias, both of ln(estimate / measured). A table of 700 rows counts as
much as one of 7, because the bias of a source is larger than the scatter inside it. The search
starts from the defaults and changes one constant at a time, in steps that grow if they help and
shrink if they do not. A constant that no run depends on keeps its default. The search draws no
random numbers, so the results are reproducible.

With --held-out, each publisher's runs are estimated with constants fitted to all other publishers.
All tables of one publisher are left out together, because they share its clusters and software.
This tests only the free constants. The other constants, the model's formulas and the rules of
``planner.published`` were written with every source in view, so other runs may have larger errors.
If no other publisher has runs on an architecture, the constants are those that
``efficiency.of_family`` gives to an architecture without measurements.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dtrain.diagnostics import UsageError
from dtrain.parallelism.cluster.efficiency import FAMILIES, Efficiency, at_its_clock, of_family
from planner.interval import ODD, Errors, described_interval
from planner.published.runs import PublishedRun, read
from validate_planner import RUNS

FREE: Mapping[str, tuple[str, ...]] = {
    "ampere": ("gemm", "launch", "exposed_data", "stream"),
    "hopper": ("gemm", "attention"),
    "blackwell": ("gemm", "attention"),
}
"""The constants that are fitted, by architecture."""
SHARES = {"gemm", "attention", "stream", "fp8", "nvfp4", "exposed_data"}
"""Constants that are shares, and so at most 1."""
BIAS = 0.3
"""Weight of a table's bias beside its mean absolute error."""
ROWS = 20
"""Runs of one table that the fit uses, evenly spread. Errors are reported on all."""
ENOUGH = 0.003
"""Relative step below which the search ends."""


def errors(runs: Iterable[PublishedRun], efficiency: Efficiency) -> Errors:
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run.seconds is not None:
            own = at_its_clock(efficiency, run.cluster.gpu)
            error = math.log(run.candidate(own).time.total / run.seconds)
            found.setdefault((run.publisher, run.table), []).append(error)
    return found


def loss(found: Errors) -> float:
    """The quantity that the fit minimizes; see above."""
    publishers: dict[str, list[float]] = {}
    for (publisher, _), table in found.items():
        each = (sum(map(abs, table)) + BIAS * abs(sum(table))) / len(table)
        publishers.setdefault(publisher, []).append(min(each, ODD))
    return fmean(fmean(tables) for tables in publishers.values())


def fit(runs: Sequence[PublishedRun], start: Efficiency, free: Sequence[str]) -> Efficiency:
    """The constants, with those in ``free`` changed to minimize the loss."""
    best = _descend(list(_sample(runs)), start, free)
    return replace(best, **{name: float(f"{getattr(best, name):.2g}") for name in free})


def _descend(sample: Sequence[PublishedRun], best: Efficiency, free: Sequence[str]) -> Efficiency:
    """Descend from these constants until no step along one of them helps."""
    least, steps = loss(errors(sample, best)), dict.fromkeys(free, 0.25)
    while max(steps.values()) > ENOUGH:
        for name in free:
            for factor in (math.exp(steps[name]), math.exp(-steps[name])):
                value = getattr(best, name) * factor
                if name in SHARES and value > 1:
                    continue
                trial = replace(best, **{name: value})
                lost = loss(errors(sample, trial))
                if lost < least - 1e-7:
                    best, least = trial, lost
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.5
    return best


def _sample(runs: Iterable[PublishedRun]) -> Iterable[PublishedRun]:
    """Some runs of each table. If the host waits for each kernel, a run shows the time of a round
    trip, and not of a launch, which few tables depend on."""
    tables: dict[str, list[PublishedRun]] = {}
    for run in runs:
        if not run.assumed.blocking:
            tables.setdefault(run.table, []).append(run)
    for found in tables.values():
        every = max(1.0, len(found) / ROWS)
        yield from (found[int(place * every)] for place in range(int(len(found) / every)))


def start_of(architecture: str) -> Efficiency:
    """The constants before the fit: free ones at their defaults, the others unchanged."""
    plain = Efficiency()
    free = {name: getattr(plain, name) for name in FREE[architecture]}
    return replace(FAMILIES[architecture], **free)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", action="append", type=Path, metavar="FILE")
    parser.add_argument("--architecture", choices=tuple(FREE))
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args(arguments)
    try:
        runs = [run for path in options.runs or RUNS for run in read(path)]
    except UsageError as error:
        print(f"error: {error.message}\n  hint: {error.hint}", file=sys.stderr)
        return 2
    every: dict[tuple[str, str], Sequence[float]] = {}
    for architecture in [options.architecture] if options.architecture else FREE:
        timed = [
            run
            for run in runs
            if isinstance(run, PublishedRun)
            and run.seconds is not None
            and run.cluster.gpu.family == architecture
        ]
        if timed and options.held_out:
            for table, found in _print_held_out(architecture, timed).items():
                every[table] = [*every.get(table, ()), *found]
        elif timed:
            _print_fit(architecture, timed)
    if every:
        print(f"all architectures: {described_interval(every, 'step times')}")
    return 0


def _print_fit(architecture: str, runs: Sequence[PublishedRun]) -> None:
    free = FREE[architecture]
    efficiency, current = fit(runs, start_of(architecture), free), FAMILIES[architecture]
    print(f"{architecture}: {len(runs)} runs")
    print(f"  {'':14}{'fitted':>10}{'in efficiency.py':>20}")
    for name in free:
        print(f"  {name:14}{getattr(efficiency, name):10.3g}{getattr(current, name):20.3g}")
    print(f"  {'loss':14}{loss(errors(runs, efficiency)):10.4f}{loss(errors(runs, current)):20.4f}")
    _print_errors(errors(runs, efficiency))


def _print_held_out(architecture: str, runs: Sequence[PublishedRun]) -> Errors:
    print(f"{architecture}: every publisher with constants fitted to the other publishers")
    found: dict[tuple[str, str], Sequence[float]] = {}
    for publisher in sorted({run.publisher for run in runs}):
        others = [run for run in runs if run.publisher != publisher]
        if others:
            efficiency = fit(others, start_of(architecture), FREE[architecture])
        else:
            efficiency = of_family("")
            print(f"  (only {publisher} has runs: with the constants of other architectures)")
        found |= errors((run for run in runs if run.publisher == publisher), efficiency)
    _print_errors(found)
    print(f"  {described_interval(found, 'step times')}\n")
    return found


def _print_errors(found: Errors) -> None:
    """A table of the errors in percent, as ``validate_planner`` prints them."""
    shares = {key[1]: [math.expm1(error) for error in found[key]] for key in sorted(found)}
    width = max(map(len, shares))
    print(f"  {'':{width}}  rows  error   bias")
    for table, each in shares.items():
        error, bias = sum(map(abs, each)) / len(each), sum(each) / len(each)
        print(f"  {table:{width}} {len(each):5}  {100 * error:5.1f}  {100 * bias:+5.1f}")
    # Sources have equal weight: otherwise the 720 rows of one would dominate.
    mean = [sum(map(abs, each)) / len(each) for each in shares.values()]
    bias_of_all = [sum(each) / len(each) for each in shares.values()]
    error, bias = sum(mean) / len(mean), sum(bias_of_all) / len(mean)
    print(f"  {'mean of tables':{width}}        {100 * error:5.1f}  {100 * bias:+5.1f}\n")


if __name__ == "__main__":
    sys.exit(main())
