"""What is seen of the workers of one attempt whose processes another system controls: telemetry,
slow ranks, stalls and hangs.

The watchers on the job's machines report it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Event, ProgressReport, Telemetry
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import Stream
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.evidence import HostEvidence
from dtrain.session.watching.reports import ProgressReports
from dtrain.session.watching.telemetry import HostTelemetry
from dtrain.session.watching.watched import WatchedJob
from dtrain.session.watching.worker_watch import WorkerWatch

LONGEST_PAUSE = 10.0
"""Seconds between two looks at the job."""


class WatchedMachine(ABC):
    """One machine of the job. See `dtrain.session.watching.watched.WatchedHost`."""

    def __init__(self, name: str, job: WatchedJob) -> None:
        self.name = name
        self.evidence = HostEvidence(name, ())
        self.telemetry = HostTelemetry(name, job)

    @property
    @abstractmethod
    def reachable(self) -> bool: ...

    @property
    @abstractmethod
    def reported_end(self) -> bool: ...

    def request_stacks(self, *, abort: bool, ras: bool) -> None:
        self.evidence.expect_stacks()
        self._request(abort=abort, ras=ras)

    @abstractmethod
    def _request(self, *, abort: bool, ras: bool) -> None: ...


_Machine = TypeVar("_Machine", bound=WatchedMachine)


class JobWatch(Generic[_Machine]):
    """Only the thread that follows the job calls it."""

    def __init__(
        self,
        plan: LaunchPlan,
        folder: RunFolder,
        recorder: Recorder,
        machine: Callable[[str, WatchedJob], _Machine],
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.recorder = recorder
        self.progress = ProgressReports(plan, recorder)
        self.steps = self.progress.steps
        self.machines: dict[str, _Machine] = {}
        """By host."""
        self.machine = machine
        """Makes the machine of a host."""
        self.allocated(plan)
        self.workers = WorkerWatch(self, self.machines, LONGEST_PAUSE)
        self._begun = False
        self.hung = False
        """Whether the job has hung, and must end."""

    def allocated(self, plan: LaunchPlan) -> None:
        """The machines are known."""
        self.plan = plan
        self.machines.clear()
        self.machines |= {name: self.machine(name, self) for name in plan.host_names}

    def begin(self) -> None:
        """The workers run."""
        if not self._begun:
            self._begun = True
            self.workers.start()

    def heard(self, host: str) -> None:
        """A worker has written something."""
        if host in self.machines:
            self.machines[host].evidence.last_activity = time.monotonic()

    def printed(self, stream: Stream, piece: bytes) -> None:
        """A worker has printed something new."""
        self.heard(stream.host)
        self.progress.add_output(stream, piece)

    def worker_said(self, host: str, report: ProgressReport) -> None:
        if self.progress.add(host, report.name, report.said):
            self.heard(host)

    def ended(self, host: str, label: str, then: float) -> None:
        """A worker has ended, with any status: the job ends soon after one that has failed. Where
        the workers of a hang waited counts, although they are killed."""
        if host in self.machines and not self.hung:
            self.machines[host].evidence.finished[label] = then

    def machine_said(self, host: str, message: Telemetry | Event) -> None:
        machine = self.machines.get(host)
        if machine is None:
            return
        match message:
            case Telemetry():
                machine.telemetry.take(message)
            case Event():
                machine.evidence.add(message)

    def close(self) -> None:
        """No more reports follow."""
        self.progress.close()

    def look(self) -> bool:
        """Show what has changed. Whether it is now seen that the job has hung, and must end."""
        self.progress.write_due()
        if not self._begun or self.hung:
            return False
        self.hung = self.workers.look()
        return self.hung
