"""What a watch looks at: a job, and the hosts of one of its attempts."""

from __future__ import annotations

from typing import Protocol

from dtrain.launchplan.plan import LaunchPlan
from dtrain.runs.folder import RunFolder
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.evidence import HostEvidence
from dtrain.session.watching.steps import StepWatch


class WatchedHost(Protocol):
    evidence: HostEvidence

    @property
    def reachable(self) -> bool:
        """Whether reports of its workers arrive."""

    @property
    def reported_end(self) -> bool:
        """Whether it will answer no more."""

    def request_stacks(self, *, abort: bool, ras: bool) -> None:
        """Have it report the stacks of its workers. ``abort``: it may kill workers for that.
        ``ras``: query NCCL, too."""


class WatchedJob(Protocol):
    @property
    def plan(self) -> LaunchPlan: ...

    @property
    def folder(self) -> RunFolder: ...

    @property
    def recorder(self) -> Recorder: ...

    @property
    def steps(self) -> StepWatch: ...
