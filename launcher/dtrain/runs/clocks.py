"""The clocks of hosts, from the times in what they have sent. Pure.

What arrived fastest gives the offset between a host's clock and the launcher's, until somebody sets
the host's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dtrain.records import dataclass
from dtrain.runs import events
from dtrain.runs.events import JournalEvent

CLOCK_SET = 60.0
"""Seconds by which a host's clock must jump. Reports are written less out of order."""
STEADY = 30.0
"""Seconds of reports that arrived equally fast: they were not late, so the clock was set."""


@dataclass(slots=True)
class HostClock:
    """A host's clock, until it is set."""

    offset: float = math.inf
    """Seconds to add for the launcher's clock."""
    since: float = 0.0
    """The first and the last report that arrived about as fast as the fastest one."""
    until: float = 0.0
    first: float = math.inf
    """The first and the last time that a report carried."""
    last: float = -math.inf

    def was_set(self, then: float, at: float) -> bool:
        """Whether a report of ``at`` that arrived at ``then`` carries another clock."""
        ahead = then - at < self.offset - CLOCK_SET and self.until - self.since >= STEADY
        return ahead or at < self.last - CLOCK_SET

    def add(self, then: float, at: float) -> None:
        """A report of ``at`` arrived at ``then``."""
        late = then - at
        if late < self.offset - 1:
            self.since = then
        if late < self.offset + 1:
            self.until = then
        self.offset = min(self.offset, late)
        self.first, self.last = min(self.first, at), at


class HostClocks:
    """The clocks of all hosts of a run, from its journal."""

    def __init__(self, records: Iterable[tuple[float, JournalEvent]]) -> None:
        self._clocks: dict[str, list[HostClock]] = {}
        for then, event in records:
            match event:
                case events.RelayHello(host, {"time": float() | int() as at}):
                    self._add(host, then, at)
                case events.HostEvent(host, _, {"time": float() | int() as at}):
                    self._add(host, then, at)

    def _add(self, host: str, then: float, at: float) -> None:
        if not math.isfinite(at):  # a damaged journal
            return
        clocks = self._clocks.setdefault(host, [HostClock()])
        if clocks[-1].was_set(then, at):
            clocks.append(HostClock())
        clocks[-1].add(then, at)

    def ours(self, host: str, at: float) -> float:
        """The time on the launcher's clock at which the host's clock showed ``at``."""
        if host not in self._clocks:
            return at
        nearest = min(self._clocks[host], key=lambda one: max(one.first - at, at - one.last))
        return at + nearest.offset
