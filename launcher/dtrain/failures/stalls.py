"""Find the ranks that a job waits for, by their counts of steps. Pure: times are arguments.

A job can stand still while its ranks write output. Then the counts show which rank holds it up: one
that is behind the others, or one that computes while the others wait in a collective. After 5 s
without a step, a process reports what it waits for, see `dtrain.runtime.steps`.

A rank stands still once it has had no step for `LEAST` seconds and for `USUAL` times its usual time
between two steps. After a long pause that ended, such as an evaluation, later pauses may be `AGAIN`
times as long.
"""

from __future__ import annotations

from collections import deque
from dataclasses import field
from statistics import median

from dtrain.hostlist import fold, in_order
from dtrain.launchplan.names import name_processes, parsed
from dtrain.records import dataclass

LEAST = 15.0
USUAL = 3.0
AGAIN = 1.5
"""A pause may be this many times as long as the longest earlier one."""
INTERVALS = 32
"""The usual time between two steps is the median of this many."""
GOES_ON = "the job goes on"


@dataclass(frozen=True, slots=True)
class Stall:
    """A job, or a rank of it, that stands still."""

    processes: tuple[str, ...]
    """Those that the others wait for, such as ``rank-3``; empty if the counts do not show it."""
    hosts: tuple[str, ...]
    seconds: float
    """Since the last step: of the processes, or of the job if there are none."""
    step: int
    """The last step."""
    waiting: int
    """Processes that wait for others."""

    @property
    def essence(self) -> tuple[object, ...]:
        """A stall is shown again when this changes."""
        return self.processes, self.step

    def __str__(self) -> str:
        if not self.processes:
            return f"no rank has done a step for {self._length}, after step {self.step}"
        verb = "stands" if len(self.processes) == 1 else "stand"
        them = "it" if len(self.processes) == 1 else "them"
        waiting = "1 waits" if self.waiting == 1 else f"{self.waiting} wait"
        others = f"; {waiting} for {them}" if self.waiting else ""
        return (
            f"{name_processes(self.processes)} on {fold(list(self.hosts))} {verb} still after step"
            f" {self.step}, for {self._length}{others}"
        )

    @property
    def _length(self) -> str:
        return f"{self.seconds:.0f} s" if self.seconds < 600 else f"{self.seconds // 60:.0f} min"


@dataclass(slots=True)
class _Process:
    host: str
    done: int
    advanced: float
    waits: str | None = None
    intervals: deque[float] = field(default_factory=lambda: deque(maxlen=INTERVALS))

    def limit(self, survived: float) -> float:
        usual = median(self.intervals) if self.intervals else 0.0
        return max(LEAST, USUAL * usual, AGAIN * survived)


class StallDetector:
    """The counts of one attempt. ``world_size`` is the number of ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._processes: dict[str, _Process] = {}
        self._ended: set[str] = set()
        self._survived = 0.0
        """The longest pause that looked like a stall and ended."""

    def add(self, process: str, host: str, done: int, waits: str | None, now: float) -> None:
        """``process`` has done ``done`` steps. ``waits`` is that of `StepReport`."""
        one = self._processes.get(process)
        if one is None:
            known = len(self._processes) + len(self._ended)
            if known < self._world_size and process not in self._ended:
                self._processes[process] = _Process(host, done, now, waits)
            return
        if done != one.done:
            pause = now - one.advanced
            if pause > one.limit(self._survived):
                self._survived = pause
            one.intervals.append(pause)
            one.done, one.advanced = done, now
        one.waits = waits

    def remove(self, process: str) -> None:
        """The process has ended, or has done its last step."""
        if self._processes.pop(process, None) is not None:
            self._ended.add(process)

    def pause(self, now: float, seconds: float) -> None:
        """No report could arrive in the last ``seconds`` before ``now``."""
        for one in self._processes.values():
            one.advanced = min(now, one.advanced + seconds)

    def find(self, now: float) -> Stall | None:
        """What stands still now."""
        everyone = self._processes
        standing = {
            name: one
            for name, one in everyone.items()
            if now - one.advanced >= one.limit(self._survived)
        }
        if not standing:
            return None
        all_stand = len(standing) == len(everyone)
        if all_stand and self._ended:
            behind = standing  # they are behind those that have ended
        else:
            most = max(one.done for one in everyone.values())
            behind = {name: one for name, one in standing.items() if one.done < most}
        if not behind and not all_stand:
            return None  # they wait for those that advance
        suspects = behind or standing
        causes = {name: one for name, one in suspects.items() if one.waits != "ranks"} or suspects
        if not behind and len(causes) == len(everyone):
            causes = {}  # they do not differ: it is unknown which ones hold up the others
        # One that is further behind may hold up the others, and cannot wait for them.
        least = min((one.done for one in causes.values()), default=0)
        causes = {name: one for name, one in causes.items() if one.done == least}
        still = (causes or standing).values()
        others = (one for name, one in everyone.items() if name not in causes)
        return Stall(
            processes=tuple(sorted(causes, key=parsed)),
            hosts=in_order(one.host for one in still),
            seconds=now - max(one.advanced for one in still),
            step=max(one.done for one in still),
            waiting=sum(one.waits == "ranks" for one in others),
        )
