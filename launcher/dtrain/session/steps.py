"""What the ranks of one attempt report about their steps, for all threads of a session."""

from __future__ import annotations

import threading

from dtrain.failures.stalls import Stall, StallDetector
from dtrain.failures.stragglers import Straggler, StragglerDetector
from dtrain.runs.progress import StepReport


class StepWatch:
    """Any thread may call it."""

    def __init__(self, world_size: int) -> None:
        self._lock = threading.Lock()
        self._stragglers = StragglerDetector(world_size)
        self._stalls = StallDetector(world_size)

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

    def disconnected(self, now: float) -> None:
        """Reports of some host cannot arrive at ``now``."""
        with self._lock:
            self._stalls.pause(now)

    def stall(self, now: float) -> Stall | None:
        """What stands still at ``now``."""
        with self._lock:
            return self._stalls.find(now)

    def stragglers(self) -> Straggler | None:
        """The ranks that are slow now."""
        with self._lock:
            return self._stragglers.find()
