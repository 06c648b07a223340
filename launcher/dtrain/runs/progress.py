"""Training progress that processes report through `dtrain.runtime`. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, field
from typing import Annotated, Any, Literal

from dtrain.failures.stragglers import Block
from dtrain.launchplan import names
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Time
from dtrain.messages.decode import ANY_NUMBER, AsList, Length, ProtocolError, Range, decode
from dtrain.records import dataclass
from dtrain.runtime.progress import MAX_METRIC_NAME, MAX_METRICS

WINDOW = 60.0
"""Seconds over which a rate is averaged."""
PHASES = ("data", "save", "load")
"""The phases of `dtrain.runtime.steps`. A newer one may report more."""
_PROCESS = re.compile(r"(rank|chief|worker|ps|evaluator)-([0-9]{1,6})")
_ORDER = ("rank", "chief", "worker", "ps", "evaluator")

_Name = Annotated[str, _PROCESS]
"""``rank-3``, or a TensorFlow task such as ``chief-0``."""
_Seconds = Annotated[float, Range(0, 1e7)]
_Count = Annotated[int, Range(0, (1 << 63) - 1)]
_Float = Annotated[float, ANY_NUMBER]


@dataclass(frozen=True, slots=True)
class Progress:
    """One report from a process."""

    process: _Name
    time: Time
    """Seconds since the epoch, on the host's clock."""
    step: _Count
    """Optimizer steps done."""
    total: _Count | None
    """Planned steps."""
    loss: _Float | None
    tokens: _Count | None
    """Tokens (or other samples) that all processes together have processed since this one began to
    report."""
    metrics: Annotated[
        Mapping[Annotated[str, Length(MAX_METRIC_NAME)], _Float], Length(MAX_METRICS)
    ]
    printed: bool = False
    """Whether it is from the output, see `job.progress`."""

    @property
    def source(self) -> tuple[str, bool]:
        """What its time is from: the launcher's clock says when a line was printed."""
        return self.process, self.printed

    @property
    def reached(self) -> str:
        """``step 120 of 240``."""
        return f"step {self.step:,}" + (f" of {self.total:,}" if self.total is not None else "")

    @classmethod
    def read(cls, process: Any, fields: Mapping[str, Any]) -> Progress:
        """A report from a host or a journal, neither of which is trusted. Raises ProtocolError."""
        found = decode(cls, {**fields, "process": process}, "progress")
        if not all(name and name.isprintable() for name in found.metrics):
            raise ProtocolError("progress: not the name of a metric")
        return found

    def as_json(self) -> dict[str, Any]:
        """The argument of `read` besides the name of the process."""
        body = asdict(self)
        del body["process"]
        return body


@dataclass(frozen=True, slots=True)
class StepReport:
    """A report of one process about its steps, see `dtrain.runtime.steps`."""

    process: _Name
    done: _Count
    """Steps."""
    waits: Literal["ranks", "data", ""] | None
    """None while the process makes steps. After some seconds without one: what it waits for, the
    other ``ranks`` or its ``data``; empty if neither is known."""
    group: _Count
    blocks: Annotated[tuple[Annotated[Block, AsList], ...], Length(64)]
    time: Time
    """Seconds since the epoch, on the host's clock."""
    phases: Mapping[str, _Seconds] = field(default_factory=dict)
    """Seconds in each of `PHASES` since the process began."""

    @classmethod
    def read(cls, process: str, fields: Mapping[str, Any]) -> StepReport:
        """A report from a host, which is not trusted. Raises ProtocolError."""
        phases = fields.get("phases")
        if isinstance(phases, dict):
            known = {name: spent for name, spent in phases.items() if name in PHASES}
            fields = {**fields, "phases": known}
        return decode(cls, {**fields, "process": process}, "steps")


def speaker(plan: LaunchPlan) -> str:
    """The first process of the job. Its phases, and what any worker prints, count for the job."""
    if plan.job.ranked:
        return names.rank_name(0)
    roles = {process.role for host in plan.hosts for process in host.processes}
    return names.process_name("chief" if "chief" in roles else "worker", 0)


class Representative:
    """The process that represents the whole job, because all train in step: of those that have
    reported, the first in `_ORDER`. What is printed only counts without other reports."""

    def __init__(self) -> None:
        self._first: tuple[bool, int, int] | None = None

    def reports(self, report: Progress) -> bool:
        """Whether ``report``, a new one, represents the job."""
        kind, number = names.parsed(report.process)
        order = report.printed, _ORDER.index(kind), number
        if self._first is None or order < self._first:
            self._first = order
        return order == self._first


class Pace:
    """The speed of the process that represents the job, from its reports."""

    def __init__(self) -> None:
        self._reports: deque[Progress] = deque()

    def add(self, report: Progress) -> None:
        last = self._reports[-1] if self._reports else report
        again = report.step < last.step or (report.tokens or 0) < (last.tokens or 0)
        if again or report.source != last.source:
            # It resumed from a checkpoint or began to count again, or another one represents the
            # job, whose clock may differ.
            self._reports.clear()
        self._reports.append(report)
        while len(self._reports) > 2 and self._reports[1].time < report.time - WINDOW:
            self._reports.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """``None`` before the second report."""
        return self._rate(lambda report: report.step)

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate(lambda report: report.tokens)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the current rate."""
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
