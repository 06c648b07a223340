"""Clocks that differ between hosts."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median_low

from dtrain.checks.evidence import Evidence
from dtrain.checks.finding import Finding

TOLERATED = 2.0
"""Seconds. Larger offsets make logs of several hosts hard to read and confuse file servers."""


def judge(evidence: Evidence) -> Iterator[Finding]:
    # The launching machine's clock counts like the others: it may be the wrong one.
    middle = median_low([0.0, *(host.clock_offset for host in evidence.hosts)])
    for host in evidence.hosts:
        off = host.clock_offset - middle
        if abs(off) - host.clock_error <= TOLERATED:
            continue
        size = f"{abs(off):.0f} s" if abs(off) < 300 else f"{abs(off) / 60:.0f} min"
        way = "ahead of" if off > 0 else "behind"
        yield host.warning(
            "clock",
            f"its clock is {size} {way} the other hosts'",
            "clocks differ by at most 2 s: certificates, tokens and file times depend on it",
            "sudo timedatectl set-ntp true there (or sudo chronyc makestep)",
        )
