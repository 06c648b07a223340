"""What is seen of the workers of one attempt on Kubernetes.

The watchers in the pods report it. Without them, no hang is detected: the log of a pod may be quiet
only because its connection is broken.
"""

from __future__ import annotations

import threading

from dtrain.diagnostics import NodeError
from dtrain.engines.kubernetes.host_states import HostStates
from dtrain.engines.kubernetes.objects import Pod
from dtrain.engines.kubernetes.watcher import PodWatcher
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Event, Notice, ProgressReport, Telemetry
from dtrain.messages.pods import PodMessage, WatcherAlive, WorkersWrote
from dtrain.runs.folder import RunFolder
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.job_watch import JobWatch, WatchedMachine
from dtrain.session.watching.watched import WatchedJob


class WatchedPod(WatchedMachine):
    """The last pod of a host."""

    def __init__(self, name: str, job: WatchedJob, states: HostStates) -> None:
        super().__init__(name, job)
        self._states = states
        self.pod: Pod | None = None
        """Once it has started."""
        self.over = threading.Event()
        """Set once its container has ended."""
        self.watcher: PodWatcher | None = None

    @property
    def reachable(self) -> bool:
        watched = self.watcher is not None and self.watcher.reachable
        return watched and not self._states.suspended

    @property
    def reported_end(self) -> bool:
        # Another pod follows one that ended because the job was suspended.
        return self.pod is not None and self.over.is_set() and self._states.counts(self.pod)

    def _request(self, *, abort: bool, ras: bool) -> None:
        if self.watcher is not None:
            self.watcher.send({"op": "stacks", "abort": abort, "ras": ras})


class KubernetesWatch(JobWatch[WatchedPod]):
    def __init__(
        self, plan: LaunchPlan, folder: RunFolder, recorder: Recorder, states: HostStates
    ) -> None:
        super().__init__(plan, folder, recorder, lambda name, job: WatchedPod(name, job, states))

    def started(self, host: str, pod: Pod, over: threading.Event) -> None:
        """``pod`` is the last one of ``host`` now. ``over``: set once its container has ended."""
        machine = self.machines[host] = self.machine(host, self)
        machine.pod, machine.over = pod, over

    def watched(self, host: str, pod: Pod, watcher: PodWatcher) -> None:
        machine = self.machines[host]
        if machine.pod is not None and machine.pod.uid == pod.uid:
            machine.watcher = watcher
            self.begin()

    def look(self) -> bool:
        """As of any job. Once all pods have ended, silence is no hang."""
        if all(machine.reported_end for machine in self.machines.values()):
            self.progress.write_due()
            return False
        return super().look()

    def said(self, host: str, message: PodMessage) -> None:
        match message:
            case WorkersWrote():
                self.heard(host)
            case ProgressReport():
                self.worker_said(host, message)
            case Notice(text):
                self.recorder.notice_of(host, text)
            case Telemetry() | Event():
                self.machine_said(host, message)
            case WatcherAlive() if self.hung and not self.ends_job:
                self._kill_workers(host)  # the first order may have been lost

    def failed(self, error: NodeError) -> None:
        """A pod is not watched."""
        missing = "no telemetry, no progress of dtrain.runtime, and no search for hangs"
        self.recorder.notice_once(f"{missing}: {error.message}", kind="unwatched")

    @property
    def ends_job(self) -> bool:
        """Whether the whole job ends because it hangs."""
        return bool(self.workers.why) and self.plan.job.watchdog.then != "restart"

    @property
    def why_end(self) -> str:
        """The hang for which the whole job must be deleted now; empty if there is none."""
        return self.workers.why if self.hung and self.ends_job else ""

    def kill_workers(self) -> None:
        """Once they have failed, Kubernetes starts the job again if it may."""
        for host in self.machines:
            self._kill_workers(host)

    def _kill_workers(self, host: str) -> None:
        if (watcher := self.machines[host].watcher) is not None:
            watcher.send({"op": "kill"})
