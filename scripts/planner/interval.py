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


def without_odd(found: Errors) -> Errors:
    return {table: each for table, each in found.items() if abs(fmean(each)) < ODD}


def interval(found: Errors) -> tuple[float, float]:
    """The first and the last decile of measured / estimate. Publishers have equal weight, and so
    have the tables of one publisher, except those with an `ODD` error.
    """
    return _deciles(without_odd(found))


def _deciles(found: Errors) -> tuple[float, float]:
    publishers: dict[str, list[Sequence[float]]] = {}
    for (publisher, _), table in found.items():
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
    """``80 % of 2,488 step times are 0.89 to 1.26 times the estimate (61 publishers, …)``."""
    even = without_odd(found)
    if not even:
        return f"no {what} to compare"
    low, high = interval(found)
    publishers = len({publisher for publisher, _ in even})
    odd = [table for publisher, table in found if (publisher, table) not in even]
    with_odd = "; with these, {:.2f} to {:.2f}".format(*_deciles(found)) if odd else ""
    return (
        f"80 % of {sum(map(len, even.values())):,} {what} are {low:.2f} to {high:.2f} times the "
        f"estimate ({publishers} publishers of equal weight"
        f"{''.join(f', without {table}' for table in odd)}{with_odd})"
    )
