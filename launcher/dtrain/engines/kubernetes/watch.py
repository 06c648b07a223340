"""What is seen of the workers of one attempt on Kubernetes.

The watchers in the pods report it. Without them, no hang is detected: the log of a pod may be quiet
only because its connection is broken.
"""

from __future__ import annotations

from dtrain.diagnostics import NodeError
from dtrain.engines.kubernetes.watcher import PodWatcher
from dtrain.launchplan.plan import LaunchPlan
from dtrain.messages.agent import Event, Notice, ProgressReport, Telemetry
from dtrain.messages.pods import PodMessage, WorkersWrote
from dtrain.runs.folder import RunFolder
from dtrain.session.reporting.recorder import Recorder
from dtrain.session.watching.job_watch import JobWatch, WatchedMachine


class WatchedPod(WatchedMachine):
    watcher: PodWatcher | None = None
    """Of its last pod."""

    @property
    def reachable(self) -> bool:
        return self.watcher is not None and self.watcher.reachable

    @property
    def reported_end(self) -> bool:
        return self.watcher is not None and self.watcher.pod_over

    def _request(self, *, abort: bool, ras: bool) -> None:
        if self.watcher is not None:
            self.watcher.send({"op": "stacks", "abort": abort, "ras": ras})


class KubernetesWatch(JobWatch[WatchedPod]):
    def __init__(self, plan: LaunchPlan, folder: RunFolder, recorder: Recorder) -> None:
        super().__init__(plan, folder, recorder, WatchedPod)

    def watched(self, host: str, watcher: PodWatcher) -> None:
        """``watcher`` begins to watch the last pod of a host."""
        self.machines[host].watcher = watcher
        self.begin()

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

    def failed(self, error: NodeError) -> None:
        """A pod is not watched."""
        missing = "no telemetry, no progress of dtrain.runtime, and no search for hangs"
        self.recorder.notice_once(f"{missing}: {error.message}", kind="unwatched")

    @property
    def ends_job(self) -> bool:
        """Whether the whole job ends because it has hung."""
        return bool(self.workers.why) and self.plan.job.watchdog.then != "restart"

    def kill_workers(self) -> None:
        for machine in self.machines.values():
            if machine.watcher is not None:
                machine.watcher.send({"op": "kill"})
