"""What is normal among values of which some are too large. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]
