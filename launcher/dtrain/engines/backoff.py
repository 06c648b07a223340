"""Pauses between attempts at the same thing. Pure."""

from __future__ import annotations


class Backoff:
    """Pauses that double, up to a limit."""

    def __init__(self, first: float, longest: float) -> None:
        """In seconds."""
        self._first, self._longest = first, longest
        self._next = first

    def next(self) -> float:
        """Seconds to wait before the next attempt."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause

    def reset(self) -> None:
        """An attempt was successful."""
        self._next = self._first
