"""What is seen of the workers of one attempt: telemetry, slow ranks, stalls and hangs.

The watchers on the job's machines report it. Without them, a hang is still detected.
"""

from __future__ import annotations

import time

from dtrain.engines.slurm.state import SlurmState
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Event, ProgressReport, Telemetry
from dtrain.messages.slurm import MachineMessage
from dtrain.node.slurm.orders import Fail, StacksOfMachine
from dtrain.runs.folder import RunFolder
from dtrain.runs.log_store import Stream
from dtrain.session.relays.relay import PING_SECONDS
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.evidence import HostEvidence
from dtrain.session.watching.reports import ProgressReports
from dtrain.session.watching.telemetry import HostTelemetry
from dtrain.session.watching.worker_watch import WorkerWatch

LONGEST_PAUSE = 2 * PING_SECONDS
"""Seconds between two messages of the program on the login host: it answers each ping."""


class WatchedMachine:
    """One machine of the job. See `dtrain.session.watching.worker_watch.WatchedHost`."""

    def __init__(self, name: str, watch: JobWatch) -> None:
        self._name = name
        self._watch = watch
        self.evidence = HostEvidence(name, ())
        self.telemetry = HostTelemetry(name, watch)

    @property
    def reachable(self) -> bool:
        return self._watch.follows

    @property
    def reported_end(self) -> bool:
        return self._watch.unwatched

    def request_stacks(self, *, abort: bool, ras: bool) -> None:
        self.evidence.expect_stacks()
        self._watch.orders.append({"op": "stacks", "host": self._name, "abort": abort, "ras": ras})


class JobWatch:
    """Only the thread that follows the job calls it."""

    def __init__(self, plan: LaunchPlan, folder: RunFolder, recorder: Recorder) -> None:
        self.plan = plan
        self.folder = folder
        self.recorder = recorder
        self.orders: list[StacksOfMachine | Fail] = []
        """For the program on the login node."""
        self.follows = False
        """Whether the job runs, and reports of it arrive."""
        self.unwatched = False
        """Whether the watchers could not start."""
        self.progress = ProgressReports(plan, recorder)
        self.steps = self.progress.steps
        self._machines: dict[str, WatchedMachine] = {}
        self.allocated(plan)
        self.workers = WorkerWatch(self, self._machines, LONGEST_PAUSE)
        self._begun = self._ended = False

    def allocated(self, plan: LaunchPlan) -> None:
        """Slurm has chosen the machines."""
        self.plan = plan
        self._machines.clear()
        self._machines |= {name: WatchedMachine(name, self) for name in plan.host_names}

    def heard(self, host: str) -> None:
        """A worker has written something."""
        if host in self._machines:
            self._machines[host].evidence.last_activity = time.monotonic()

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
        if host in self._machines and not self._ended:
            self._machines[host].evidence.finished[label] = then

    def notice(self, host: str, text: str) -> None:
        """The program on the login node has a notice about the host."""
        if host in self._machines:
            self.recorder.notice_of(host, text)
        else:  # the job ended before Slurm named its machines
            self.recorder.notice_of(self.plan.name, f"{host}: {text}")

    def machine_said(self, host: str, message: MachineMessage) -> None:
        machine = self._machines.get(host)
        if machine is None:
            return
        self.unwatched = False
        match message:
            case Telemetry():
                machine.telemetry.take(message)
            case Event():
                machine.evidence.add(message)

    def close(self) -> None:
        """No more reports follow."""
        self.progress.close()

    def update(self, state: SlurmState | None) -> None:
        """``state`` of a job whose reports arrive; None while no connection is open."""
        runs = state is not None and state.state == "RUNNING"
        if runs and not self._begun:
            self._begun = True
            self.workers.start()
        self.follows = runs

    def look(self) -> None:
        """Show what has changed, and add to `orders`."""
        self.progress.write_due()
        if not self._begun or self._ended:
            return
        if self.workers.look():
            self._ended = True
            restart = self.plan.job.watchdog.then == "restart"
            self.orders.append({"op": "fail", "restart": restart})
