"""What the ranks of one attempt report about their steps, for all threads of a session."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from dtrain.failures.activity import GpuActivity
from dtrain.failures.round_trips import RoundTripTimes
from dtrain.failures.stalls import Stall, StallDetector
from dtrain.failures.stragglers import (
    Cause,
    Straggler,
    StragglerDetector,
    causes_seen,
    gpus_of_ranks,
    less_active,
)
from dtrain.messages.telemetry import Sample
from dtrain.runs.progress import StepReport

REMEMBERED = 30.0
"""Seconds for which a cause in the telemetry counts: a GPU may be throttled only now and then."""


class StepWatch:
    """Any thread may call it."""

    def __init__(self, world_size: int) -> None:
        self._lock = threading.Lock()
        self._stragglers = StragglerDetector(world_size)
        self._stalls = StallDetector(world_size)
        self._activity = GpuActivity()
        self._trips = RoundTripTimes()
        self._seen: dict[str, dict[tuple[str, Cause], float]] = {}
        """When the telemetry of each host has last shown a cause for a process."""

    def add(self, host: str, report: StepReport, now: float) -> None:
        """Add a report that arrived from ``host`` at ``now`` (`time.monotonic`)."""
        with self._lock:
            self._stalls.add(report.process, host, report.done, report.waits, now)
            for block in report.blocks:
                self._stragglers.add(report.process, host, report.group, block)

    def end(self, process: str) -> None:
        """The process has ended, or has done its last step."""
        with self._lock:
            self._stalls.remove(process)

    def pause(self, now: float, seconds: float) -> None:
        """Reports of some host could not arrive in the last ``seconds`` before ``now``."""
        with self._lock:
            self._stalls.pause(now, seconds)

    def stall(self, now: float) -> Stall | None:
        """What stands still at ``now``."""
        with self._lock:
            return self._stalls.find(now)

    def sample(self, host: str, sample: Sample, job_gpus: Collection[int], now: float) -> None:
        """Add the telemetry of a host, whose job uses the GPUs ``job_gpus``; empty means all."""
        with self._lock:
            if not self._stragglers.knows_compute:
                self._activity.add(host, gpus_of_ranks(sample, job_gpus), now)
            if sample.round_trip is not None:
                self._trips.add(host, sample.round_trip, now)
            found = causes_seen(sample, job_gpus)
            if host in self._trips.far(now):
                for causes in found.values():
                    causes.add("far")
            last = self._seen.get(host, {})
            shown = [(process, cause) for process, causes in found.items() for cause in causes]
            self._seen[host] = _recent(last, now) | dict.fromkeys(shown, now)

    def stragglers(self, now: float) -> Straggler | None:
        """The ranks that are slow at ``now``."""
        with self._lock:
            seen: dict[tuple[str, str], set[Cause]] = {}
            for host, shown in self._seen.items():
                for process, cause in _recent(shown, now):
                    seen.setdefault((host, process), set()).add(cause)
            found = self._stragglers.find(seen)
            if found is None and not self._stragglers.knows_compute:
                found = less_active(self._activity.slow(now), seen)
            return found


def _recent(shown: Mapping[tuple[str, Cause], float], now: float) -> dict[tuple[str, Cause], float]:
    return {what: then for what, then in shown.items() if now - then < REMEMBERED}
