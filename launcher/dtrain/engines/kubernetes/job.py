"""One job on Kubernetes: what is known of it, kept in the run's record and shown to the user."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from dtrain.engines.followed_run import FollowedRun
from dtrain.engines.kubernetes.ending import KubernetesEnding, PodEnding, done, failures
from dtrain.engines.kubernetes.host_states import HostStates
from dtrain.engines.kubernetes.kinds import job_kind
from dtrain.engines.kubernetes.lines import Cursor, ProcessEnd
from dtrain.engines.kubernetes.objects import KubernetesJobState, Pod
from dtrain.engines.kubernetes.output import LogPositions, PodOutput
from dtrain.engines.kubernetes.reading import PodLines
from dtrain.engines.kubernetes.tensorboard import show_tensorboard
from dtrain.engines.kubernetes.watch import KubernetesWatch
from dtrain.engines.kubernetes.watcher import (
    PodWatcher,
    WatcherEnded,
    WatcherEvent,
    WatcherFailed,
    WatcherSaid,
)
from dtrain.failures.cause import LEFT, Report, in_order_of_blame
from dtrain.launchplan.pods import object_name
from dtrain.messages.decode import ProtocolError
from dtrain.records import dataclass
from dtrain.runs import events
from dtrain.runs.folder import RunFolder
from dtrain.runs.record import Record
from dtrain.runs.storage import StorageError
from dtrain.session.caller import Caller

SAVE_SECONDS = 1.0
"""Seconds between two times that the positions in the logs are stored."""
SIDECAR_SECONDS = 30.0
"""Seconds in which a sidecar may end after the job's own container, as well-behaved ones do."""


@dataclass(slots=True)
class FollowedPod:
    """One pod whose log is read."""

    pod: Pod
    """Its last state."""
    output: PodOutput
    cursor: Cursor
    over: threading.Event
    """Set once its container has ended, or the pod is gone."""
    read: bool = False
    """Whether its whole log is stored."""
    watched: bool = False
    """Whether its processes are watched: reports may come."""

    @property
    def ending(self) -> PodEnding:
        return PodEnding(self.pod, self.output.position.ends, tuple(self.output.words))


class KubernetesJob(FollowedRun):
    ranks_share_stderr = True

    def __init__(
        self, record: Record, folder: RunFolder, caller: Caller, secrets: Mapping[str, str]
    ) -> None:
        """Raises UsageError if the folder has positions that this version cannot read."""
        super().__init__(record, folder, caller, secrets)
        self._positions = LogPositions(folder.path)
        self.state: KubernetesJobState | None = None
        self.seen = False
        """Whether the server has said if there is such a job."""
        self.pods: dict[str, FollowedPod] = {}
        """The pods of this attempt, by their uid."""
        self._waiting: dict[str, Pod] = {}
        """Pods of a later attempt."""
        self.hosts = HostStates(self.plan, self.name, self.recorder)
        self._deleted: list[Pod] = []
        """Pods that were deleted while they ran, before any had failed, in the order of events."""
        self._stopping = False
        self._save_due = 0.0
        self._kept_open_until = math.inf
        self._finished = False
        """Whether the processes were done when dtrain deleted the job."""
        self.watch = KubernetesWatch(self.plan, self.folder, self.recorder, self.hosts)

    @property
    def name(self) -> str:
        return object_name(self.plan.name, self.plan.run)

    def created(self) -> None:
        self.begun(f"{job_kind(self.plan).name} {self.name} is created")

    def stopping(self, why: str) -> None:
        if not self._stopping:
            self._stopping = True
            self.recorder.record(events.StopRequested(why))
            self.recorder.notice(f"deleting {self.name} ({why})")

    # What the server reports ---------------------------------------------------------------------

    def job_seen(self, state: KubernetesJobState | None, reason: str) -> None:
        """``reason``: why a queue holds it back."""
        self.seen = True
        self.state = state
        if state is not None:
            self.hosts.job(state, reason)

    @property
    def pods_missing(self) -> bool:
        """Whether the job runs and has not all its pods."""
        state = self.state
        runs = state is not None and not state.suspended and not state.over
        return runs and bool(self.hosts.absent)

    def pod_seen(self, pod: Pod, *, removed: bool = False) -> FollowedPod | None:
        """A pod has changed. Returns it if its log can be read from now on. Raises StorageError."""
        if pod.index >= len(self.plan.hosts):
            return None
        if pod.attempt > self.record.attempt:
            self._waiting[pod.uid] = pod
            return None
        known = self.pods.get(pod.uid)
        if pod.attempt < self.record.attempt and known is None:
            return None
        if known is not None and known.pod.ended is not None:
            # The first end counts. The last event of a pod that is gone may be older, and a
            # container that has started again ends again. A later deletion has not ended it.
            pod = replace(pod, ended=known.pod.ended, deleted=known.pod.deleted)
        elif removed and not pod.deleted:  # it had no time to terminate
            pod = replace(pod, deleted=time.time())
        self.hosts.pod(pod, removed=removed)
        if (pod.deleted or removed) and not (pod.over or self._failed):
            self._deleted.append(pod)
        if known is not None:
            known.pod = pod
            if pod.over or removed:
                known.over.set()
            return None
        if not pod.started or removed:
            return None
        position = self._positions.of(pod.uid)
        part, ranked = self.plan.hosts[pod.index], self.plan.job.ranked
        output = PodOutput(self.folder, part, position, ranked=ranked)
        cursor = Cursor(position.last, position.count, position.latest)
        new = self.pods[pod.uid] = FollowedPod(pod, output, cursor, threading.Event())
        if pod.over:
            new.over.set()
        if self.hosts.counts(pod):
            self.watch.started(part.host.name, pod, new.over)
        for end in position.ends:
            self._process_ended(new, end)
        return new

    def listed(self, pods: tuple[Pod, ...]) -> list[FollowedPod]:
        """All pods of the job. Returns those whose log can be read from now on."""
        self.hosts.listed(pods)
        uids = {pod.uid for pod in pods}
        for uid, known in self.pods.items():
            if uid not in uids:
                known.over.set()
        by_deletion = sorted(pods, key=lambda pod: pod.deleted)
        return [new for pod in by_deletion if (new := self.pod_seen(pod)) is not None]

    def keep(self, lines: PodLines) -> None:
        """Store and show a piece of output. Raises StorageError and AnswerError."""
        known = self.pods.get(lines.uid)
        if known is None:
            return
        if known.output.lacks(lines):
            known.output.skip()
            self.recorder.notice(
                f"{self._host(known.pod)}: lines are missing in the output:"
                " the kubelet has rotated the log before they were read"
            )
        self._positions.save_new()
        ended = len(known.output.position.ends)
        try:
            grown = known.output.keep(lines)
        except ProtocolError as error:
            self.recorder.notice_once(f"pod {known.pod.name}: {error}")
            return
        for stream, (size, piece) in grown.items():
            self.recorder.observer.output(stream, size)
            self.watch.printed(stream, piece)
        for end in known.output.position.ends[ended:]:
            self._process_ended(known, end)
        now = time.monotonic()
        if now >= self._save_due:
            self._save_due = now + SAVE_SECONDS
            self._positions.save()

    def _process_ended(self, known: FollowedPod, end: ProcessEnd) -> None:
        if end.status == 0 and not end.after_term:
            labels = {one.name: one.label for one in self.plan.hosts[known.pod.index].processes}
            self.watch.ended(self._host(known.pod), labels[end.process], end.time)

    def log_problem(self, uid: str, text: str) -> None:
        """A kubelet has sent ``text`` instead of a log."""
        if (known := self.pods.get(uid)) is not None:
            pod = known.pod
            self.recorder.notice_once(f"{self._host(pod)}: the log of pod {pod.name}: {text}")

    def log_ended(self, uid: str, *, whole: bool) -> None:
        known = self.pods.get(uid)
        if known is None:
            return
        known.read = True
        pod = known.pod
        ran = pod.running or pod.ended is not None or known.cursor.last >= 0
        if ran and not whole and not known.output.position.whole:
            self.recorder.notice(
                f"{self._host(pod)}: the last lines of the output may be missing: the log of pod"
                f" {pod.name} could not be read to its end"
            )

    def container_ended(self, uid: str) -> bool:
        """Whether no new lines are written to this log."""
        return uid in self.pods and self.pods[uid].over.is_set()

    def watched(self, known: FollowedPod, watcher: PodWatcher) -> None:
        known.watched = True
        self.watch.watched(self._host(known.pod), known.pod, watcher)

    def watcher_event(self, event: WatcherEvent) -> None:
        known = self.pods.get(event.uid)
        if known is None:
            return
        match event:
            case WatcherSaid(_, message):
                self.watch.said(self._host(known.pod), message)
                show_tensorboard(self.record, self.recorder, known.pod, message)
            case WatcherFailed(_, error):
                self.watch.failed(error)
            case WatcherEnded():
                known.watched = False

    def give_up_logs(self) -> None:
        """No more output of this attempt is awaited."""
        for uid, known in self.pods.items():
            known.watched = False
            if not known.read:
                self.log_ended(uid, whole=False)

    @property
    def all_read(self) -> bool:
        """Whether the whole output of this attempt is stored."""
        return all(known.read and not known.watched for known in self.pods.values())

    # The end of an attempt -----------------------------------------------------------------------

    @property
    def restarts(self) -> bool:
        """Whether Kubernetes has begun a later attempt."""
        # The state of a TrainJob does not count restarts, but its pods do.
        known = self.state is not None and self.state.attempt > self.record.attempt
        return known or bool(self._waiting)

    def why_endless(self) -> str:
        """Why the job will not end although its processes have ended or cannot go on; empty if it
        will."""
        counted = self._counted
        again = next((pod for pod in counted if pod.again), None)
        over = self._failed or (counted if done(self.plan, counted) else [])
        kept = next((pod for pod in over if pod.sidecar and pod.phase == "Running"), None)
        if again is None and kept is None:
            self._kept_open_until = math.inf
            return ""
        now = time.monotonic()
        self._kept_open_until = min(self._kept_open_until, now + SIDECAR_SECONDS)
        waited = now >= self._kept_open_until
        # Its log is deleted with it.
        if again is not None and (waited or self.pods[again.uid].read):
            return (
                f"{self._host(again)}: Kubernetes has started the failed container again, as the"
                " runtime of the TrainJob asks; the other pods cannot go on with it"
            )
        if kept is None or not waited:
            return ""
        return (
            f"{self._host(kept)}: the processes have ended, but the sidecar {kept.sidecar} goes on,"
            " so that the pod does not end"
        )

    def ending(self, why: str) -> None:
        """dtrain deletes the job, because it would not end."""
        self._finished = done(self.plan, self._counted)
        self.recorder.notice_once(f"{why}: deleting {self.name}")

    @property
    def _counted(self) -> list[Pod]:
        return [one.pod for one in self.pods.values() if self.hosts.counts(one.pod)]

    @property
    def _failed(self) -> list[Pod]:
        """Pods with a process that failed on its own."""
        return [
            pod
            for pod in self._counted
            if (pod.ended is not None and pod.ended.exitCode)
            or any(one.failed for one in self.pods[pod.uid].output.position.ends)
        ]

    def _host(self, pod: Pod) -> str:
        return self.plan.hosts[pod.index].host.name

    def begin_next_attempt(self) -> list[FollowedPod]:
        """Returns the pods whose log can be read from now on."""
        self.watch.close()
        step = self.watch.progress.step
        self.next_attempt(self._ending("").failed(), "all pods start again", step=step)
        self.watch = KubernetesWatch(self.plan, self.folder, self.recorder, self.hosts)
        self.pods.clear()
        self._deleted.clear()
        self.hosts.begin_attempt()
        waiting, self._waiting = self._waiting, {}
        return [new for pod in waiting.values() if (new := self.pod_seen(pod)) is not None]

    def ended(self, stopped_by: str) -> Report:
        return self._ending(stopped_by).report()

    def _ending(self, stopped_by: str) -> KubernetesEnding:
        never_started = [pod for pod in self._deleted if pod.uid not in self.pods]
        pods = [
            *(known.ending for known in self.pods.values()),
            *(PodEnding(pod) for pod in never_started),
        ]
        pods = [ending for ending in pods if self.hosts.counts(ending.pod)]
        failed = failures(self.plan, pods, time.time())
        workers = self.watch.workers
        return KubernetesEnding(
            name=self.name,
            state=self.state,
            plan=self.plan,
            pods=pods,
            failures=in_order_of_blame(map(self.explained, failed)),
            deleted=next(filter(self.hosts.counts, self._deleted), None),
            stopped_by=stopped_by,
            finished=self._finished,
            hang=workers.why,
            waits=tuple(workers.whereabouts()) if workers.why else (),
        )

    # The end of the run --------------------------------------------------------------------------

    def _close(self) -> None:
        self.watch.close()
        # On a full disk, a later process reads some lines again.
        with contextlib.suppress(StorageError):
            self._positions.save()

    def leave(self, report: Report = LEFT) -> Report:
        self._close()
        return super().leave(report)

    def finish(self, report: Report) -> Report:
        self._close()
        self.hosts.ended()
        return super().finish(report)
