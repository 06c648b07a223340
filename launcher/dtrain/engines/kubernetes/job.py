"""One job on Kubernetes: what is known of it, kept in the run's record and shown to the user."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dtrain.diagnostics import NodeError
from dtrain.engines.completion import announce, completed, with_cause
from dtrain.engines.kubernetes.ending import JobEnding, PodEnding, failures
from dtrain.engines.kubernetes.lines import Cursor
from dtrain.engines.kubernetes.objects import JobState, Pod
from dtrain.engines.kubernetes.output import PodOutput, Position, Positions
from dtrain.engines.kubernetes.reading import Lines
from dtrain.failures.cause import Report, in_order_of_blame
from dtrain.launchplan import names
from dtrain.messages.decode import ProtocolError
from dtrain.runs import journal
from dtrain.runs.log_store import RunFolder, StorageError
from dtrain.runs.record import Record
from dtrain.runs.restart import AttemptResult
from dtrain.runs.shown_state import ShownState
from dtrain.session.beginning import save
from dtrain.session.notifications import Notifications
from dtrain.session.observer import Observer
from dtrain.session.recorder import Recorder

SAVE_SECONDS = 1.0
"""Seconds between two times that the positions in the logs are stored."""
SIZES_SECONDS = 10.0
"""Seconds between two journal entries about the size of the output received so far."""


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


class KubernetesJob:
    """Only the thread that follows the job calls it."""

    def __init__(
        self,
        record: Record,
        folder: RunFolder,
        *,
        observer: Observer,
        on_running: Callable[[str], None],
        secrets: Mapping[str, str],
    ) -> None:
        """``on_running`` gets the run's name once Kubernetes has the job. Raises UsageError if the
        folder has positions that this version cannot read."""
        self.record = record
        self._folder = folder
        self._observer = observer
        self._on_running = on_running
        self._recorder = Recorder(folder, observer)
        self._notifications = Notifications(record.request, folder, self._recorder, secrets)
        self._positions = Positions(folder.path)
        self.plan = record.plan()
        self.state: JobState | None = None
        self.seen = False
        """Whether the server has shown the job."""
        self.pods: dict[str, FollowedPod] = {}
        """The pods of this attempt, by their uid."""
        self._waiting: dict[str, Pod] = {}
        """Pods of a later attempt."""
        self._states: dict[str, tuple[ShownState, str]] = {}
        self._present: set[str] = set()
        """Hosts whose pod was there in this attempt."""
        self._shown: set[str] = set()
        self._changed: dict[str, int] = {}
        self._save_due = self._sizes_due = 0.0

    @property
    def name(self) -> str:
        return names.object_name(self.plan.name, self.record.run)

    def created(self) -> None:
        kind = (
            "TrainJob"
            if self.plan.kubernetes and self.plan.kubernetes.api != "jobset"
            else "JobSet"
        )
        self._recorder.notice(f"{kind} {self.name} is created")
        self._on_running(self.record.run)

    def notice_once(self, text: str) -> None:
        if text not in self._shown:
            self._shown.add(text)
            self._recorder.notice(text)

    def notice(self, text: str) -> None:
        self._recorder.notice(text)

    def stopping(self, why: str) -> None:
        self._recorder.record(journal.StopRequested(why))
        self.notice_once(f"deleting {self.name} ({why})")

    # What the server reports ---------------------------------------------------------------------

    def job_seen(self, state: JobState | None) -> None:
        self.seen |= state is not None
        self.state = state
        if state is None:
            return
        keys = self.plan.kubernetes
        queue = f"waits in the queue {keys.queue or ''}".rstrip() if keys is not None else ""
        if state.suspended:
            self.notice_once(f"{self.name} {queue}")
        for host in self.plan.host_names:
            shown = self._states.get(host)
            if host not in self._present and (shown is None or shown[1] in ("", queue)):
                self._show(host, ShownState.QUEUED, queue if state.suspended else "")

    @property
    def pods_missing(self) -> bool:
        """Whether the job runs and has not all its pods."""
        state = self.state
        runs = state is not None and not state.suspended and not state.over
        return runs and len(self._present) < len(self.plan.hosts)

    def warned(self, text: str) -> None:
        """Kubernetes says why it does not create a pod."""
        for host in self.plan.host_names:
            if host not in self._present:
                self._show(host, ShownState.QUEUED, text)

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
        host = self.plan.hosts[pod.index].host.name
        self._present.add(host)
        if known is None:
            if not pod.started or removed:
                self._show(host, pod.state, pod.detail)
                return None
            position = self._positions.pods.setdefault(pod.uid, Position())
            output = PodOutput(
                self._folder, self.plan.hosts[pod.index], position, ranked=self.plan.job.ranked
            )
            cursor = Cursor(position.last, position.count)
            known = FollowedPod(pod, output, cursor, threading.Event())
            self.pods[pod.uid] = known
            # Before the first line, so that no line is stored twice.
            self._positions.save()
            new = known
        else:
            # The last event of a pod that is gone may be older than the end of its container.
            if known.pod.ended is not None and pod.ended is None:
                pod = replace(pod, ended=known.pod.ended)
            known.pod = pod
            new = None
        if pod.over or removed:
            known.over.set()
        self._show(host, ShownState.ENDED if removed else pod.state, pod.detail)
        if pod.disrupted:
            self.notice_once(f"{host}: pod {pod.name}: {pod.disrupted}")
        return new

    def listed(self, pods: tuple[Pod, ...]) -> list[FollowedPod]:
        """All pods of the job. Returns those whose log can be read from now on."""
        uids = {pod.uid for pod in pods}
        for uid, known in self.pods.items():
            if uid not in uids:
                known.over.set()
        return [new for pod in pods if (new := self.pod_seen(pod)) is not None]

    def keep(self, lines: Lines) -> None:
        """Store and show a piece of output. Raises StorageError and AnswerError."""
        known = self.pods.get(lines.uid)
        if known is None:
            return
        if lines.gap:
            self._recorder.notice(
                f"{self.plan.hosts[known.pod.index].host.name}: lines are missing in the output:"
                " the kubelet has rotated the log before they were read"
            )
        try:
            grown = known.output.keep(lines.lines, lines.last, lines.count)
        except ProtocolError as error:
            self.notice_once(f"pod {known.pod.name}: {error}")
            return
        for stream, size in grown.items():
            self._observer.output(stream, size)
            self._changed[str(stream.path.relative_to(self._folder.path))] = size
        now = time.monotonic()
        if now >= self._save_due:
            self._save_due = now + SAVE_SECONDS
            self._positions.save()
        self._record_sizes(now)

    def log_ended(self, uid: str, *, whole: bool) -> None:
        known = self.pods.get(uid)
        if known is None:
            return
        known.read = True
        if not whole:
            host = self.plan.hosts[known.pod.index].host.name
            self._recorder.notice(
                f"{host}: the last lines of the output may be missing: the log of pod"
                f" {known.pod.name} could not be read to its end"
            )

    def container_ended(self, uid: str) -> bool:
        """Whether no new lines are written to this log."""
        return uid in self.pods and self.pods[uid].over.is_set()

    def give_up_logs(self) -> None:
        """No more output of this attempt is awaited."""
        for uid, known in self.pods.items():
            if not known.read:
                self.log_ended(uid, whole=False)

    @property
    def all_read(self) -> bool:
        """Whether the whole output of this attempt is stored."""
        return all(known.read for known in self.pods.values())

    def _show(self, host: str, state: ShownState, detail: str) -> None:
        if self._states.get(host) == (state, detail):
            return
        self._states[host] = state, detail
        self._recorder.record(journal.HostState(host, state, detail))
        queued = state is ShownState.QUEUED and not detail.startswith("waits in the queue")
        if detail and (queued or state is ShownState.PREPARING):
            self.notice_once(f"{host} waits: {detail}")

    def _record_sizes(self, now: float) -> None:
        if now >= self._sizes_due and self._changed:
            self._sizes_due = now + SIZES_SECONDS
            changed, self._changed = self._changed, {}
            self._recorder.record(journal.Sizes(changed))

    # The end of an attempt -----------------------------------------------------------------------

    @property
    def restarts(self) -> bool:
        """Whether Kubernetes has begun a later attempt."""
        # The state of a TrainJob does not count restarts, but its pods do.
        known = self.state is not None and self.state.attempt > self.record.attempt
        return known or bool(self._waiting)

    def begin_next_attempt(self) -> list[FollowedPod]:
        """Returns the pods whose log can be read from now on."""
        number = self.record.attempt
        report = completed(self._ending("").failed(), self.record, self._folder)
        culprit = report.failures[0].host if report.failures else None
        result = AttemptResult(ran=True, step=None, culprit=culprit)
        self._recorder.record(journal.AttemptFailed(number, result, report))
        self._notifications.send("restarted", number, report)
        self._recorder.notice(f"{report.reason}; all pods start again (restart {number})")
        self.record = replace(self.record, attempt=number + 1)
        self._folder = replace(self._folder, attempt=number + 1)
        self.plan = save(self.record, self._folder)
        self._recorder.next_attempt(number + 1, self.plan)
        self.pods.clear()
        self._states.clear()
        self._present.clear()
        waiting, self._waiting = self._waiting, {}
        return [new for pod in waiting.values() if (new := self.pod_seen(pod)) is not None]

    def ended(self, stopped_by: str) -> Report:
        return self._ending(stopped_by).report()

    def _ending(self, stopped_by: str) -> JobEnding:
        pods = [
            PodEnding(known.pod, known.output.ends, tuple(known.output.words))
            for known in self.pods.values()
        ]
        failed = failures(self.plan, pods, time.time())
        return JobEnding(
            name=self.name,
            state=self.state,
            plan=self.plan,
            pods=pods,
            failures=in_order_of_blame(with_cause(one, self._folder.logs) for one in failed),
            stopped_by=stopped_by,
        )

    # The end of the run --------------------------------------------------------------------------

    def failed(self, error: NodeError) -> Report:
        """The report of a job that could not be created."""
        return Report(
            error.exit_code,
            f"not created: {error.attempted} failed",
            problems=(error.message,),
            hint=error.hint,
        )

    def left_over(self) -> None:
        """The objects of the job could not be deleted: `dtrain stop` tries again."""
        hosts = tuple((host, self.record.attempt) for host in self.plan.host_names)
        self.record = replace(self.record, leftovers=hosts)
        save(self.record, self._folder)

    def leave(self, report: Report) -> Report:
        """The job goes on without this process."""
        self._positions.save()
        self._notifications.close()
        self._observer.left(self.record.run)
        return replace(report, logs=str(self._folder.path))

    def finish(self, report: Report) -> Report:
        with contextlib.suppress(StorageError):  # a full disk: nobody reads on from there
            self._positions.save()
        self._sizes_due = 0.0
        self._record_sizes(time.monotonic())
        report = completed(report, self.record, self._folder)
        for host in self.plan.host_names:
            self._show(host, ShownState.ENDED, "")
        announce(report, self.record, self._notifications, self._recorder)
        return report
