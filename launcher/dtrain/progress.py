"""How far a training is, as its processes say through `dtrain.runtime`. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.launchplan import LaunchPlan

WINDOW = 60.0
"""Seconds of the past that a rate is taken over."""
MAX_METRICS = 32
_PROCESS = re.compile(r"(rank|chief|worker|ps|evaluator)-([0-9]{1,6})")
_ORDER = ("rank", "chief", "worker", "ps", "evaluator")


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a process."""

    process: str
    """``rank-3``, or a TensorFlow task such as ``chief-0``."""
    time: float
    """Seconds since the epoch, on the host's clock."""
    step: int
    """Optimizer steps done."""
    total: int | None
    """Steps in all."""
    loss: float | None
    tokens: int | None
    """Tokens (or other samples) that all processes together have gone through since this one
    began to report."""
    metrics: Mapping[str, float]

    @property
    def order(self) -> tuple[int, int]:
        """The process with the least speaks for the job."""
        kind, _, number = self.process.partition("-")
        return _ORDER.index(kind), int(number)

    @classmethod
    def read(cls, process: str, said: Mapping[str, Any]) -> Progress:
        """A report as a host sends it, which is not taken on trust.

        Raises KeyError, TypeError or ValueError for anything that is not a report.
        """
        if not _PROCESS.fullmatch(process):
            raise ValueError(f"not the name of a process: {process!r}")
        step, total, loss, tokens = said["step"], said["total"], said["loss"], said["tokens"]
        metrics = said["metrics"]
        if len(metrics) > MAX_METRICS:
            raise ValueError(f"more than {MAX_METRICS} metrics")
        return cls(
            process,
            float(said["time"]),
            int(step),
            None if total is None else int(total),
            None if loss is None else float(loss),
            None if tokens is None else int(tokens),
            {str(name): float(value) for name, value in metrics.items()},
        )


def speaker(plan: LaunchPlan) -> str:
    """The process whose reports stand for the whole job."""
    if plan.job.framework == "torch":
        return "rank-0"
    roles = {process.role for host in plan.hosts for process in host.processes}
    return "chief-0" if "chief" in roles else "worker-0"


class Pace:
    """How fast one process goes on, from its reports."""

    def __init__(self) -> None:
        self._reports: deque[Progress] = deque()

    def add(self, report: Progress) -> None:
        if self._reports and report.step < self._reports[-1].step:
            # It has gone back to a checkpoint.
            self._reports.clear()
        self._reports.append(report)
        while len(self._reports) > 2 and self._reports[1].time < report.time - WINDOW:
            self._reports.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """``None`` until two reports tell."""
        return self._rate(lambda report: report.step)

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate(lambda report: report.tokens)

    @property
    def seconds_left(self) -> float | None:
        """Until the last step, at the present rate."""
        rate = self.steps_per_second
        if not rate:
            return None
        last = self._reports[-1]
        return None if last.total is None else max(0, last.total - last.step) / rate

    def _rate(self, amount: Callable[[Progress], int | None]) -> float | None:
        if len(self._reports) < 2:
            return None
        first, last = self._reports[0], self._reports[-1]
        before, now = amount(first), amount(last)
        if before is None or now is None or last.time <= first.time:
            return None
        return (now - before) / (last.time - first.time)
