#!/usr/bin/env python3
"""Measures how far published runs of the same thing differ: no planner can be nearer to them.

    scripts/planner/floor.py [--list]

Groups the runs whose rows give the same sizes of the model, GPUs, network, precision, sequence,
batch, layout and recomputation. Their members are one of three:

- publishers. NVIDIA's repositories are one publisher, and so are MLPerf's rounds.
- versions: tables or commits of one publisher, with the same assumptions about its software.
- repeats: rows of one version, with the same assumptions about the software.

Prints for step times and memory peaks the mean absolute errors, in percent, of three estimates:

- common: the median of the group. Too near, because it is made from what it is compared with.
- others: the median of the other members. Too far, because these differ from the mean, too.
- planner: the planner's, on the same runs.

Members have equal weight in a group, groups in a publisher, and publishers in the mean. Figures
within 0.05 % are copies of one measurement and count once. With --list, prints the groups, too.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planner.published.rows import UnusableError, rows
from planner.published.runs import PublishedRun, run_of
from validate_planner import RUNS, UNSEEN, Outcome, outcome_of

COPY = 0.0005
"""Relative difference below which two figures are copies of one measurement."""
KINDS = ("publishers", "versions", "repeats")


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured step time or memory peak, and the planner's estimate of it."""

    name: str
    publisher: str
    version: str
    said: object
    """What the row says of the run."""
    known: object
    """The same, with all that the planner assumes about the software."""
    measured: float
    estimated: float


def figures(measure: str) -> Iterator[Figure]:
    """The step times (``time``) or memory peaks (``memory``) of all published runs."""
    for path in (*RUNS, *UNSEEN.values()):
        for row in rows(path):
            try:
                outcome = outcome_of(run_of(row))
            except UnusableError:
                continue
            if not isinstance(outcome, Outcome) or getattr(outcome, measure) is None:
                continue
            run, commit = outcome.run, re.search(r"@\w+", row["source"])
            time = measure == "time"
            said = _said(run) if time else (_said(run), run.counter)
            yield Figure(
                name=run.name,
                publisher=re.sub(r"^(NVIDIA|MLPerf).*", r"\1", run.publisher),
                version=f"{run.table} {commit[0] if commit else ''}",
                said=said,
                known=(said, run.assumed),
                measured=(run.seconds if time else run.memory) or 0.0,
                estimated=outcome.seconds if time else outcome.gib,
            )


def _said(run: PublishedRun) -> object:
    shape, cluster = run.shape, run.cluster
    return (
        (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn_hidden, shape.lora),
        (shape.experts, shape.experts_per_token, shape.seq_len, round(math.log2(shape.vocab), 1)),
        (cluster.gpu.name, cluster.gpus, cluster.network, run.layout, run.assumed.precision),
    )


def groups(kind: str, every: Sequence[Figure]) -> list[list[list[Figure]]]:
    """The groups of a kind with at least two members, each with its figures."""
    found: dict[object, dict[object, list[Figure]]] = {}
    for one in every:
        key: object
        if kind == "publishers":
            key, member = one.said, one.publisher
        elif kind == "versions":
            key, member = (one.publisher, one.known), one.version
        else:
            key, member = (one.publisher, one.version, one.known), one.name
        members = found.setdefault(key, {})
        known = [other.measured for each in members.values() for other in each]
        if all(abs(one.measured / other - 1) > COPY for other in known):
            members.setdefault(member, []).append(one)
    return [list(members.values()) for members in found.values() if len(members) > 1]


def errors(found: Sequence[Sequence[Sequence[Figure]]]) -> tuple[float, float, float]:
    """The errors of the three estimates: common, others, planner."""
    publishers: dict[str, list[tuple[float, ...]]] = {}
    for group in found:
        each = [median(one.measured for one in member) for member in group]
        of_group: dict[str, list[tuple[float, ...]]] = {}
        for place, member in enumerate(group):
            others = median(each[:place] + each[place + 1 :])
            planner = median(one.estimated / one.measured for one in member) * each[place]
            of_group.setdefault(member[0].publisher, []).append(
                tuple(abs(one / each[place] - 1) for one in (median(each), others, planner))
            )
        for publisher, some in of_group.items():
            publishers.setdefault(publisher, []).append(_means(some))
    common, others, planner = _means([_means(some) for some in publishers.values()])
    return common, others, planner


def _means(some: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(fmean(column) for column in zip(*some, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the groups")
    options = parser.parse_args()
    for measure in ("time", "memory"):
        every = list(figures(measure))
        for kind in KINDS:
            found = groups(kind, every)
            if not found:
                print(f"{measure:6} {kind:10}    0 groups")
                continue
            runs = [one for group in found for member in group for one in member]
            publishers = {one.publisher for one in runs}
            common, others, planner = (100 * error for error in errors(found))
            print(
                f"{measure:6} {kind:10}  {len(found):3} groups {len(runs):4} runs "
                f"{len(publishers):2} publishers: common {common:4.1f} %, others {others:4.1f} %, "
                f"planner {planner:4.1f} %"
            )
            if options.list:
                for group in found:
                    each = [f"{one.name} {one.measured:.4g}" for member in group for one in member]
                    print("  ", ", ".join(each))
    return 0


if __name__ == "__main__":
    sys.exit(main())
