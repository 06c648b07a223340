"""Split consecutive layers into parts and minimize the heaviest part."""

from __future__ import annotations

from collections.abc import Sequence


def split(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the number of consecutive weights in each part that minimizes the heaviest part.

    Parts are as equal as that allows; the last ones are empty if there are too few weights.
    """
    low, high = max(weights), float(sum(weights))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _needed(weights, middle) <= parts else (middle, high)
    counts = []
    start = 0
    for left in range(parts, 0, -1):
        rest = weights[start:]
        count, load = 0, 0.0
        fair = sum(rest) / left
        for weight in rest:
            behind = _needed(rest[count:], high)
            if count and load + weight > high:
                break
            if count and load + weight / 2 >= fair and behind <= left - 1:
                break
            count, load = count + 1, load + weight
        counts.append(count)
        start += count
    return tuple(counts)


def _needed(weights: Sequence[float], most: float) -> int:
    """Return the number of parts of at most ``most`` that the weights need."""
    parts, load = (1, 0.0) if weights else (0, 0.0)
    for weight in weights:
        if load + weight > most:
            parts, load = parts + 1, 0.0
        load += weight
    return parts
