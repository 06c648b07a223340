"""Find the hosts whose network is slow, by the round trips of their connections. Pure: times are
arguments."""

from __future__ import annotations

from collections import deque

from dtrain.failures.stragglers import lower_quartile

FRESH, TRIPS = 10.0, 360
"""Seconds for which a round trip counts, and how many of the job's typical round trips, one every
`FRESH` seconds, give the usual one."""
BETWEEN_TRIPS = 1.0
"""Seconds between two comparisons of round trips."""
FAR, LEAST_FAR = 3.0, 1.0
"""A host is far if its round trips take this many times as long as usual in the job, and this many
milliseconds longer."""


class RoundTripTimes:
    """Compares the round trips of the hosts of a job."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}
        self._usual: deque[float] = deque(maxlen=TRIPS)
        self._due = 0.0
        self._far: set[str] = set()
        self._far_until = 0.0

    def add(self, host: str, milliseconds: float, now: float) -> None:
        """A host's sample at ``now``."""
        self._last[host] = (milliseconds, now)
        if now >= self._due:
            self._due = now + FRESH
            self._usual.append(lower_quartile(self._current(now).values()))

    def _current(self, now: float) -> dict[str, float]:
        return {host: trip for host, (trip, then) in self._last.items() if now - then < FRESH}

    def far(self, now: float) -> set[str]:
        """The hosts whose round trips take long: all of two, or at most half of more. Compared
        once in `BETWEEN_TRIPS`, because each sample of each host asks."""
        if now >= self._far_until:
            self._far_until = now + BETWEEN_TRIPS
            self._far = self._compare(now)
        return self._far

    def _compare(self, now: float) -> set[str]:
        current = self._current(now)
        if len(current) < 2:
            return set()
        usual = min(lower_quartile(current.values()), lower_quartile(self._usual))
        found = {
            host
            for host, trip in current.items()
            if trip > FAR * usual and trip > usual + LEAST_FAR
        }
        return found if len(found) * 2 <= len(current) or len(current) == 2 else set()
