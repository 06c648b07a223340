"""The interval that contains 80 % of the measurements, as multiples of the estimate."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean

ODD = 1.0
"""Mean error, as a logarithm, above which a publisher's table neither moves the constants nor
counts for the interval: nanotron's runs reach 3 % of the peak."""

Errors = Mapping[tuple[str, str], Sequence[float]]
"""ln(estimate / measured), by publisher and table."""


def interval(found: Errors) -> tuple[float, float]:
    """The first and the last decile of measured / estimate. Publishers have equal weight, and so
    have the tables of one publisher, except those with an `ODD` error.
    """
    publishers: dict[str, list[Sequence[float]]] = {}
    for (publisher, _), table in found.items():
        if abs(fmean(table)) < ODD:
            publishers.setdefault(publisher, []).append(table)
    weighted = sorted(
        (-error, 1 / len(publishers) / len(tables) / len(table))
        for tables in publishers.values()
        for table in tables
        for error in table
    )
    below = list(accumulate(weight for _, weight in weighted))
    low, high = (weighted[bisect_left(below, share)][0] for share in (0.1, 0.9))
    return math.exp(low), math.exp(high)


def described_interval(found: Errors, what: str) -> str:
    """``80 % of the step times are 0.82 to 1.28 times the estimate, …``."""
    low, high = interval(found)
    odd = [table for (_, table), each in found.items() if abs(fmean(each)) >= ODD]
    return (
        f"80 % of the {what} are {low:.2f} to {high:.2f} times the estimate, "
        f"with equal weight for each publisher{''.join(f', without {table}' for table in odd)}"
    )
