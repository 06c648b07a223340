"""The progress of a training in one line. Pure."""

from __future__ import annotations

from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs.progress import Pace, Progress, Representative
from dtrain.spec.model import Expected
from dtrain.wording import short
from dtrain_cli.views import names

BETWEEN_LINES = 10.0
"""Seconds between progress lines in output without a header."""


class ProgressLine:
    """Derives the job's progress from the reports of its processes."""

    def __init__(self) -> None:
        self._pace, self._representative = Pace(), Representative()
        self.last: Progress | None = None
        """The last report that represents the job."""
        self._expected: Expected | None = None
        self._devices = 0

    def expect(self, plan: LaunchPlan) -> None:
        """Compare the job with what its plan expects, if the cluster file says it."""
        self._expected, self._devices = plan.job.expected, plan.devices

    def add(self, report: Progress) -> bool:
        """Return whether ``report`` represents the job."""
        if not self._representative.reports(report):
            return False
        self._pace.add(report)
        self.last = report
        return True

    @property
    def text(self) -> str:
        """``step 120 of 240 · loss 2.413 · 5.2 steps/s · 6.6k tokens/s · 23 s left``."""
        return " · ".join(text for _, text in self._parts())

    def fitted(self, columns: int) -> str:
        """`text`, without its less important parts if it is wider than ``columns``."""
        parts = self._parts()
        while len(parts) > 1 and len(" · ".join(text for _, text in parts)) > columns:
            # Of the least important parts, the last.
            parts.remove(max(reversed(parts), key=lambda part: part[0]))
        return " · ".join(text for _, text in parts)

    def _parts(self) -> list[tuple[int, str]]:
        """Each with its rank: parts of rank 0 are the most important."""
        report, pace = self.last, self._pace
        if report is None:
            return []
        parts = [(0, report.reached)]
        if report.loss is not None:
            parts.append((2, f"loss {report.loss:.4g}"))
        parts += [(5, f"{name} {value:.4g}") for name, value in report.metrics.items()]
        if steps := pace.steps_per_second:
            parts.append((3, f"{steps:.1f} steps/s" if steps >= 1 else f"{1 / steps:.1f} s/step"))
        if (tokens := pace.tokens_per_second) is not None:
            parts.append((4, f"{short(tokens)} tokens/s"))
        if planned := self._planned():
            parts.append((2, planned))
        if left := pace.seconds_left:
            parts.append((1, f"{names.duration(left)} left"))
        return parts

    def _planned(self) -> str:
        """``MFU 41.2 % (44.0 % planned)``, or only the planned time of a step."""
        expected, steps = self._expected, self._pace.steps_per_second
        if expected is None or not expected.step_time or not steps:
            return ""
        tokens = self._pace.tokens_per_second
        mfu = expected.mfu(tokens, self._devices) if tokens else None
        if not mfu:
            return f"{expected.step_time * steps * 100:.0f} % of the planned speed"
        planned = mfu / (steps * expected.step_time)
        return f"MFU {mfu * 100:.1f} % ({planned * 100:.1f} % planned)"
