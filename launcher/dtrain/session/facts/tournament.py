"""Round-robin pairing. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def rounds(players: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Every pair once, in rounds without repeated players (the circle method)."""
    circle: list[int | None] = [*players]
    if len(circle) % 2:
        circle.append(None)
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle.insert(1, circle.pop())
