"""What is seen of the workers of one attempt on Kubernetes: see `JobWatch`.

The watchers in the pods report it. Without them, no hang is detected: the log of a pod may be quiet
only because its connection is broken.
"""

from __future__ import annotations

from dtrain.engines.kubernetes.watcher import PodWatcher
from dtrain.session.watching.job_watch import JobWatch, WatchedMachine


class PodMachine(WatchedMachine):
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

    def kill_workers(self) -> None:
        if self.watcher is not None:
            self.watcher.send({"op": "kill"})


PodWatch = JobWatch[PodMachine]
