"""What is seen of the workers of one attempt of a Slurm job.

Without watchers on its machines, a hang is still detected.
"""

from __future__ import annotations

from dtrain.engines.slurm.state import SlurmState
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Event, Telemetry
from dtrain.node.slurm.orders import Fail, StacksOfMachine
from dtrain.runs.folder import RunFolder
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.job_watch import JobWatch, WatchedMachine
from dtrain.session.watching.watched import WatchedJob


class AllocatedMachine(WatchedMachine):
    def __init__(self, name: str, job: WatchedJob, watch: SlurmWatch) -> None:
        super().__init__(name, job)
        self._watch = watch
        self.watched = False
        """Whether its watcher has reported anything."""
        self._order: StacksOfMachine | None = None
        """For a watcher that has not started."""

    @property
    def reachable(self) -> bool:
        return self._watch.follows

    @property
    def reported_end(self) -> bool:
        return self._watch.unwatched and self._watch.follows

    def _request(self, *, abort: bool, ras: bool) -> None:
        self._order = {"op": "stacks", "host": self.name, "abort": abort, "ras": ras}
        self._send()

    def heard(self) -> None:
        """Its watcher has reported something."""
        self.watched = True
        self._send()

    def _send(self) -> None:
        if self.watched and self._order is not None:
            self._watch.orders.append(self._order)
            self._order = None


class SlurmWatch(JobWatch[AllocatedMachine]):
    def __init__(self, plan: LaunchPlan, folder: RunFolder, recorder: Recorder) -> None:
        self.orders: list[StacksOfMachine | Fail] = []
        """For the program on the login node."""
        self.follows = False
        """Whether the job runs, and reports of it arrive."""
        self.unwatched = False
        """Whether the watchers could not start."""
        super().__init__(
            plan, folder, recorder, lambda name, job: AllocatedMachine(name, job, self)
        )

    def notice(self, host: str, text: str) -> None:
        """The program on the login node has a notice about the host."""
        if host in self.machines:
            self.recorder.notice_of(host, text)
        else:  # the job ended before Slurm named its machines
            self.recorder.notice_of(self.plan.name, f"{host}: {text}")

    def machine_said(self, host: str, message: Telemetry | Event) -> None:
        if host in self.machines:
            self.unwatched = False
            self.machines[host].heard()
        super().machine_said(host, message)

    def update(self, state: SlurmState | None) -> None:
        """``state`` of a job whose reports arrive; None while no connection is open."""
        if state is None:  # the next connection starts watchers of its own
            for machine in self.machines.values():
                machine.watched = False
        self.follows = state is not None and state.state == "RUNNING"
        if self.follows:
            self.begin()

    def look(self) -> bool:
        """As of any job. Adds to `orders`."""
        hangs = super().look()
        if hangs:
            restart = self.plan.job.watchdog.then == "restart"
            self.orders.append({"op": "fail", "restart": restart})
        return hangs
